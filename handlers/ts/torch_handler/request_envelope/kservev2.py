"""KServe's second protocol. The first request of a batch only, so the batch size has to be 1."""

import json
from typing import Any

import numpy

from .base import BaseEnvelope, body_of

_DATATYPES = {
    "bool": "BOOL",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}


class KServev2Envelope(BaseEnvelope):
    """`{"inputs": […]}` in, `{"outputs": […]}` out."""

    def __init__(self, handle_fn: Any) -> None:
        super().__init__(handle_fn)
        self._id: str | None = None
        self._names: list[str] = []

    def parse_input(self, data: list[dict[str, Any]]) -> list[Any]:
        """The inputs of the first request, their data in the form that `shape` says."""
        body = body_of(data[0])
        if isinstance(body, bytes | bytearray | str):
            body = json.loads(body)
        inputs = body.get("inputs") if isinstance(body, dict) else None
        if not isinstance(inputs, list):
            raise ValueError("the request has no list of `inputs`")
        self._id = str(body.get("id") or "").strip() or None
        self._names = [str(given["name"]) for given in inputs]
        return [_shaped(given) for given in inputs]

    def format_output(self, results: list[Any]) -> list[Any]:
        """One output for each result, under the name of the input at its place."""
        if len(results) > len(self._names):
            raise ValueError(
                f"the handler returned {len(results)} outputs for {len(self._names)} inputs"
            )
        model = (self.context.manifest or {}).get("model") or {}
        return [
            {
                "id": self._id or self.context.get_request_id(0),
                "model_name": model.get("modelName"),
                "model_version": model.get("modelVersion"),
                "outputs": [
                    _output(name, result)
                    for name, result in zip(self._names, results, strict=False)
                ],
            }
        ]


def _shaped(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("datatype") == "BYTES":
        return {**given, "data": given["data"][0] if given["data"] else ""}
    if "shape" not in given:
        return given
    return {**given, "data": numpy.array(given["data"]).reshape(given["shape"]).tolist()}


def _output(name: str, result: Any) -> dict[str, Any]:
    flat = numpy.asarray(result).flatten()
    return {
        "name": name,
        "datatype": _DATATYPES.get(flat.dtype.name, "BYTES"),
        "data": flat.tolist(),
        "shape": [len(flat)],
    }
