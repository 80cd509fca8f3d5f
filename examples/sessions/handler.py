"""Tells for each reading of a sensor whether it is out of the ordinary, given those before it."""

from dataclasses import dataclass

from ts.service import PredictionException


@dataclass
class Readings:
    """Number, mean and squared deviations of a sensor's readings so far (Welford's method)."""

    sensor: str
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> dict[str, float | int | bool]:
        """Judges a reading, then learns from it."""
        deviation = (self.squares / self.count) ** 0.5 if self.count else 0.0
        unusual = self.count >= 5 and abs(value - self.mean) > 4 * deviation
        self.count += 1
        change = value - self.mean
        self.mean += change / self.count
        self.squares += change * (value - self.mean)
        return {"count": self.count, "mean": self.mean, "unusual": unusual}


class Sensors:
    """One sequence for each sensor. All of one run in this worker, always in the same row."""

    def initialize(self, context) -> None:
        """There are as many rows as sequences at once, so these do not grow."""
        self.rows: dict[str, Readings] = {}

    def handle(self, data: list[dict], context) -> list:
        """A batch has at most one reading of each sensor."""
        return [self.judge(context, index, row["body"]) for index, row in enumerate(data)]

    def judge(self, context, index: int, body: bytearray):
        """One reading; a bad one fails alone."""
        row = context.get_request_header(index, "ts_request_sequence_row")
        sensor = context.get_sequence_id(index)
        starts = context.get_request_header(index, "ts_request_sequence_start") == "true"
        if starts or row not in self.rows or self.rows[row].sensor != sensor:
            self.rows[row] = Readings(sensor)
        try:
            value = float(body)
        except ValueError:
            return PredictionException("a number is expected", 400)
        return self.rows[row].add(value)
