"""One label of a metric."""


class Dimension:
    """A label's name and its value."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: str) -> None:
        self.name = name
        self.value = value

    def to_dict(self) -> dict[str, str]:
        """For JSON."""
        return {"Name": self.name, "Value": self.value}

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def __repr__(self) -> str:
        return f"Dimension({self.name!r}, {self.value!r})"
