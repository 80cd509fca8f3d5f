"""The server's side of a handler's process. Private: `bridge` is all that the server calls."""
