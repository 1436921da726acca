"""Figures of this process for Prometheus: `ballonet.metrics.serve(port)`. The server has the same at `/metrics`."""

from .hooks.watch.endpoint import Endpoint, serve

__all__ = ["Endpoint", "serve"]
