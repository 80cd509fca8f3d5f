"""Whether something that is measured again and again grows.

A leak is small beside what load does to a number from one second to the next, so the judgement has
to find a trend in noise, and must not call noise a trend:

- The measured time is cut into fifteen equal spans, each of which counts as the lowest tenth of its
  values: what load takes for a moment goes again, what has leaked is there at the quietest one. A
  saw whose teeth are shorter than a span is flat.
- Two figures say how much was added. The *rise* is the median of the slopes between any two spans
  (Theil and Sen), times the measured time: it sees what grows steadily, also slowly. The *shift* is
  the median of the last five spans less that of the first five: it sees what grew at once, which
  the rise does not. The larger one counts.
- The noise is how much neighbouring spans differ, which neither a slow trend nor a single step
  changes. Twice what it lets a median of five spans err by is forgiven, but no more than is allowed
  anyway: where there is too much noise to tell, the answer is that it grows.
- Allowed are 2 % of what there was, and a floor for things that are few.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SPANS = 15
ALLOWED_SHARE = 0.02
# Standard deviations of normal noise in one median absolute deviation, and of its median in one of
# its mean.
OF_DEVIATION = 1.4826
OF_MEDIAN = 1.2533


@dataclass(frozen=True)
class Verdict:
    """What became of a number; all of it in the number's own unit."""

    first: float
    last: float
    rise: float
    noise: float
    allowed: float

    @property
    def grown(self) -> float:
        """What was added while it was measured."""
        return max(self.rise, self.last - self.first)

    @property
    def is_flat(self) -> bool:
        return self.grown <= self.allowed + min(2 * self.noise, self.allowed)


def judge(values: Sequence[float], floor: float) -> Verdict:
    """Judges values that were measured at equal intervals."""
    spans = lows(values)
    third = SPANS // 3
    first, last = statistics.median(spans[:third]), statistics.median(spans[-third:])
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in itertools.combinations(enumerate(spans), 2)]
    steps = [b - a for a, b in itertools.pairwise(spans)]
    middle = statistics.median(steps)
    # A step is the difference of two spans, and a shift that of two medians of five.
    deviation = OF_DEVIATION * statistics.median(abs(s - middle) for s in steps) / math.sqrt(2)
    return Verdict(
        first=first,
        last=last,
        # The line through a step is steeper than the step is high.
        rise=min(statistics.median(slopes) * (SPANS - 1), max(spans) - min(spans)),
        noise=OF_MEDIAN * deviation * math.sqrt(2 / third),
        allowed=max(ALLOWED_SHARE * abs(first), floor),
    )


def lows(values: Sequence[float]) -> list[float]:
    """The lowest tenths of the spans, of equal length as far as the number of values allows it."""
    if len(values) < SPANS:
        raise ValueError(f"{len(values)} values are too few to judge: {SPANS} are needed")
    cuts = [len(values) * number // SPANS for number in range(SPANS + 1)]
    return [sorted(values[a:b])[(b - a) // 10] for a, b in itertools.pairwise(cuts)]
