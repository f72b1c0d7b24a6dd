"""The OpenAI-compatible HTTP gateway: an optional process in front of the coordinator.

Owns HTTP: routes, what requests and replies look like, errors in OpenAI's shape. Does not know
workers, rounds or messages: it talks to the system through `common.sdk` alone.
May import: `common.sdk` and all to its left; starlette and uvicorn, which are the extra `http`.
"""
