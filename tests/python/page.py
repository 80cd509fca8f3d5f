"""A strict reader of Prometheus' text format 0.0.4, and of what TorchServe's form adds to it."""

import math
import re
from dataclasses import dataclass, field

METRIC = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)",')
SAMPLE = re.compile(rf"({METRIC})(?:\{{(.*)\}})? (\S+)")
ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}

Labels = frozenset[tuple[str, str]]


@dataclass
class Page:
    """Types by family, and values by the name and the labels of their sample."""

    types: dict[str, str] = field(default_factory=dict)
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def all(self, name: str, **labels: str) -> list[float]:
        """Values of this name whose labels hold all of these."""
        wanted = set(labels.items())
        return [
            value
            for (sample, own), value in self.samples.items()
            if sample == name and wanted <= own
        ]

    def value(self, name: str, **labels: str) -> float | None:
        """The only such value, if there is one."""
        found = self.all(name, **labels)
        assert len(found) <= 1, f"{name} {labels} is not one series"
        return found[0] if found else None


def read(text: str) -> Page:
    """Reads a page; fails on whatever a strict reader would not take."""
    page = Page()
    assert not text or text.endswith("\n"), "the last line does not end"
    family, state = "", "filled"
    for line in text.split("\n")[:-1]:
        if found := re.fullmatch(rf"# HELP ({METRIC}) (?:[^\\]|\\[\\n])*", line):
            assert state == "filled", f"{family} has no samples"
            assert found[1] > family, f"out of order, or twice: {line}"
            family, state = found[1], "helped"
        elif found := re.fullmatch(rf"# TYPE ({METRIC}) (counter|gauge|histogram)", line):
            assert (family, state) == (found[1], "helped"), f"out of place: {line}"
            page.types[family], state = found[2], "typed"
        else:
            _read_sample(page, family, line)
            assert state != "helped", f"no type: {line}"
            state = "filled"
    assert state == "filled", f"{family} has no samples"
    for family, kind in page.types.items():
        if kind == "histogram":
            _check_histogram(page, family)
    return page


def _read_sample(page: Page, family: str, line: str) -> None:
    found = SAMPLE.fullmatch(line)
    assert found, f"not a sample: {line}"
    name, text, number = found.groups()
    endings = ("_bucket", "_sum", "_count") if page.types.get(family) == "histogram" else ("",)
    assert name in [family + ending for ending in endings], f"it stands among {family}: {line}"
    labels = [
        (label, re.sub(r"\\.", lambda escape: ESCAPES[escape[0]], value))
        for label, value in LABEL.findall(text or "")
    ]
    assert LABEL.sub("", text or "") == "", f"labels: {line}"
    assert len(dict(labels)) == len(labels), f"a label twice: {line}"
    assert "." in number or number in ("NaN", "+Inf", "-Inf"), f"no point: {line}"
    assert page.types.get(family) != "counter" or float(number) >= 0, line
    key = (name, frozenset(labels))
    assert key not in page.samples, f"twice: {line}"
    page.samples[key] = float(number)


def _check_histogram(page: Page, family: str) -> None:
    buckets: dict[Labels, list[tuple[float, float]]] = {}
    for (name, labels), value in page.samples.items():
        if name == f"{family}_bucket":
            bounds = [bound for label, bound in labels if label == "le"]
            rest = frozenset(pair for pair in labels if pair[0] != "le")
            buckets.setdefault(rest, []).append((float(bounds[0]), value))
    for labels, counts in buckets.items():
        assert counts == sorted(set(counts)), f"{family} is not cumulative: {counts}"
        assert [value for _, value in counts] == sorted(value for _, value in counts), family
        assert math.isinf(counts[-1][0]), f"{family} has no bucket for all"
        assert page.samples[f"{family}_count", labels] == counts[-1][1], family
        assert (f"{family}_sum", labels) in page.samples
