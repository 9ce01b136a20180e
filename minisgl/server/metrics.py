"""What a server tells Prometheus: how busy the engine is, how much went through, how long it took.

Chapter 1 tells this module's story. What the engine counts is asked of it at each scrape; what only the front can see,
times as clients feel them, is observed as it happens. Each app has a registry of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from minisgl.server.client import EngineStats

_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The front's own counts and times.

    Attributes:
        requests: counts by route and outcome: a finish reason, "error", or "left" for a client that did not wait.
        refused: counts by HTTP status.
        in_flight: requests being answered.
        first_token_s: from a request's arrival to its first token.
        update_s: between updates of one request; an update has one token a text, or more if its reader is slow.
        request_s: from a request's arrival to its end.
    """

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.requests = Counter(
            "minisgl_requests", "Requests that have ended.", ["route", "outcome"], registry=registry
        )
        self.refused = Counter("minisgl_refused", "Requests refused or failed.", ["status"], registry=registry)
        self.in_flight = Gauge("minisgl_requests_in_flight", "Requests being answered.", registry=registry)
        self.first_token_s = Histogram(
            "minisgl_first_token_seconds", "Time to the first token.", buckets=_FIRST_TOKEN_S, registry=registry
        )
        self.update_s = Histogram(
            "minisgl_update_seconds", "Time between updates of a request.", buckets=_TOKEN_S, registry=registry
        )
        self.request_s = Histogram(
            "minisgl_request_seconds", "Time of a whole request.", buckets=_REQUEST_S, registry=registry
        )
        self._engine = _EngineCollector()
        registry.register(self._engine)

    def render(self, stats: EngineStats | None) -> bytes:
        """Everything in Prometheus' text format; ``stats`` is the engine's state now, None if it does not answer."""
        self._engine.stats = stats
        return generate_latest(self._registry)


class _EngineCollector:
    """`EngineStats` as metrics."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        """The metrics of ``stats``, with the names that dashboards will use."""
        stats = self.stats
        yield GaugeMetricFamily("minisgl_up", "Whether the engine answers.", value=stats is not None)
        if stats is None:
            return
        used = stats.num_pages - stats.num_free_pages - stats.num_cached_pages
        gauges = {
            "requests_running": ("Requests that have a row.", stats.num_running),
            "requests_waiting": ("Requests that wait for one.", stats.num_waiting),
            "kv_pages": ("Pages of the KV pool.", stats.num_pages),
            "kv_pages_free": ("Pages that hold nothing.", stats.num_free_pages),
            "kv_pages_cached": ("Pages that only the prefix cache holds.", stats.num_cached_pages),
            "kv_used_ratio": ("Share of the pages that requests hold.", used / max(stats.num_pages, 1)),
            "prefix_hit_ratio": (
                "Share of prompt tokens that came from the prefix cache, since the start.",
                stats.cached_tokens / max(stats.prompt_tokens, 1),
            ),
            "heartbeat_age_seconds": ("Since the engine's loop last turned.", stats.heartbeat_age_s),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens.", stats.prompt_tokens),
            "cached_tokens": ("Prompt tokens that came from the prefix cache.", stats.cached_tokens),
            "output_tokens": ("Tokens generated.", stats.output_tokens),
            "steps": ("Steps of the engine.", stats.num_steps),
            "preemptions": ("Requests that had to give up their pages for a while.", stats.num_preemptions),
            "failed_checks": ("Integrity checks that failed; any is a bug.", stats.num_failed_checks),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"minisgl_{name}", text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"minisgl_{name}", text, value=value)
