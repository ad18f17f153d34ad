"""The routes for monitoring: health, readiness, and numbers as JSON and for Prometheus."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, HTTPException, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine import Engine
from .gateway import CurrentGateway

router = APIRouter(tags=["health"])


class EngineCollector(Collector):
    """An engine's numbers as Prometheus metrics."""

    def __init__(self, engine: Engine) -> None:
        """Read `engine`."""
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the current numbers."""
        now = self._engine.stats()
        counters = {"ticks": now.ticks, "inputs": now.inputs, "steps": now.steps, "failures": now.failures}
        for name, value in counters.items():
            yield CounterMetricFamily(f"hiddenstate_{name}", f"{name} since the start", value=value)
        gauges = {
            "batch_size": (now.batch, "operations in a tick, mean over the last thousand"),
            "tick_seconds": (now.tick_seconds, "seconds of a tick, mean over the last thousand"),
            "hot_sessions": (self._engine.hot, "sessions whose state is at hand"),
            "pending": (self._engine.pending, "operations that wait or are under way"),
        }
        for name, (level, meaning) in gauges.items():
            yield GaugeMetricFamily(f"hiddenstate_{name}", meaning, value=level)
        latency = GaugeMetricFamily("hiddenstate_latency_seconds", "from call to answer, lately", labels=["quantile"])
        latency.add_metric(["0.5"], now.latency_p50)
        latency.add_metric(["0.99"], now.latency_p99)
        yield latency


def registry_of(engine: Engine) -> CollectorRegistry:
    """Return a registry of its own, so that two engines in one process do not mix."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    return registry


@router.get("/healthz")
async def alive() -> dict[str, str]:
    """Say that the process is there."""
    return {"status": "alive"}


@router.get("/readyz", responses={503: {"description": "the server is shutting down"}})
async def ready(gateway: CurrentGateway) -> dict[str, str]:
    """Say whether inputs are taken."""
    if gateway.draining:
        raise HTTPException(503, "the server is shutting down.")
    return {"status": "ready", "fingerprint": gateway.engine.fingerprint}


@router.get("/v1/stats")
async def stats(gateway: CurrentGateway) -> dict[str, Any]:
    """Return the numbers that the live page shows."""
    engine = gateway.engine
    return {**dataclasses.asdict(engine.stats()), "hot": engine.hot, "pending": engine.pending}


@router.get("/metrics", response_class=Response)
async def metrics(gateway: CurrentGateway) -> Response:
    """Return all numbers as Prometheus reads them."""
    return Response(generate_latest(registry_of(gateway.engine)), media_type=CONTENT_TYPE_LATEST)
