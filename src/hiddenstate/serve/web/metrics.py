"""The routes for monitoring: health, readiness, and numbers as JSON and for Prometheus."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...errors import HiddenStateError
from ..engine import Engine
from ..worker import BOUNDS, Histogram
from .gateway import CurrentCaller, CurrentGateway, Gateway
from .guard import Guard

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
        counters["sessions_set_back"] = now.set_back
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
        yield _histogram("queue_wait_seconds", "from call to the tick that answers it", now.waiting)
        yield _histogram("answer_seconds", "from call to answer", now.answering)
        yield _histogram("model_seconds", "of a tick within calls of the model", now.model)
        yield _histogram("store_seconds", "of a tick within the store", now.store)


def _histogram(name: str, meaning: str, times: Histogram) -> Metric:
    sums = list(accumulate(times.counts))
    buckets = [(str(bound), count) for bound, count in zip((*BOUNDS, "+Inf"), sums, strict=True)]
    return HistogramMetricFamily(f"hiddenstate_{name}", meaning, buckets=buckets, sum_value=times.seconds)


def registry_of(engine: Engine) -> CollectorRegistry:
    """Return a registry of its own, so that two engines in one process do not mix."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    return registry


@router.head("/healthz", include_in_schema=False)  # as some balancers ask
@router.get("/healthz")
async def alive() -> dict[str, str]:
    """Say that the process is there."""
    return {"status": "alive"}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", responses={503: {"description": "the server is shutting down, or its store does not answer"}})
async def ready(gateway: CurrentGateway) -> dict[str, str]:
    """Say whether inputs are taken."""
    await gateway.ready()
    return {"status": "ready", "fingerprint": gateway.engine.fingerprint}


@router.get("/v1/stats")
async def stats(gateway: CurrentGateway, caller: CurrentCaller) -> dict[str, Any]:
    """Return the numbers that the live page shows; with a token, where these are needed."""
    return _stats(gateway.engine)


@router.get("/metrics", response_class=Response)
async def metrics(gateway: CurrentGateway, caller: CurrentCaller) -> Response:
    """Return all numbers as Prometheus reads them; with a token, where these are needed."""
    return _metrics(gateway.engine)


def metrics_app(gateway: Gateway) -> FastAPI:
    """Return an application for a port of its own, which needs no token: health, numbers, and what an operator does."""
    app = FastAPI(title="hiddenstate metrics", version="1", openapi_url=None)
    app.state.gateway = gateway
    app.get("/healthz")(alive)
    app.get("/readyz")(lambda: _checked(gateway))
    app.get("/v1/stats")(lambda: _stats(gateway.engine))
    app.get("/metrics")(lambda: _metrics(gateway.engine))
    app.get("/v1/versions")(gateway.engine.versions)
    app.post("/v1/drain", status_code=204)(gateway.engine.drain)
    app.add_middleware(Guard, hosts=[], origins=())  # a page that somebody opens on this machine must not drain it
    return app


def _checked(gateway: Gateway) -> dict[str, str]:
    """Do as `ready`, in a thread of this application's own."""
    try:
        gateway.engine.check()
    except HiddenStateError as error:
        raise HTTPException(503, str(error)) from None
    if gateway.draining:
        raise HTTPException(503, "the server is shutting down.")
    return {"status": "ready", "fingerprint": gateway.engine.fingerprint}


def _stats(engine: Engine) -> dict[str, Any]:
    return {**dataclasses.asdict(engine.stats()), "hot": engine.hot, "pending": engine.pending}


def _metrics(engine: Engine) -> Response:
    return Response(generate_latest(registry_of(engine)), media_type=CONTENT_TYPE_LATEST)
