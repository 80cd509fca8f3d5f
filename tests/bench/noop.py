"""The handler that does nothing: what a request costs beside its model."""


def handle(data, context):
    """Answers each request with two bytes."""
    return None if data is None else [b"ok"] * len(data)
