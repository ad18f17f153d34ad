"""The engine over HTTP and WebSockets. Only this folder needs the web stack of the extra `serve`."""

from .app import make_app
from .gateway import Limits

__all__ = ["Limits", "make_app"]
