"""The engine over HTTP and WebSockets. Only this folder needs the web stack of the extra `serve`."""

from .app import make_app
from .callers import Given, Tokens, open_tokens
from .gateway import Limits
from .metrics import metrics_app

__all__ = ["Given", "Limits", "Tokens", "make_app", "metrics_app", "open_tokens"]
