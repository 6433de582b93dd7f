# SPDX-License-Identifier: Apache-2.0
"""Counters, gauges and histograms of Prometheus, whose text is rendered when a value has changed, not when it is read.

An endpoint picker reads the metrics of each pod 20 times a second. prometheus_client builds each page anew, which takes
100 ms with 100 adapters. Here each series keeps its lines until its value changes, and a page only joins them. The
names of methods are those of prometheus_client. All calls must come from one thread.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, Generic, TypeVar

_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})
_LABEL_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

Rename = Callable[[str, dict[str, str]], tuple[str, dict[str, str]]]
"""Function that returns another name and other labels for a series."""


class Series:
    """One value of a family, with its labels."""

    def __init__(self, name: str, labels: dict[str, str]) -> None:
        self._name, self._labels = name, labels
        self._text: str | None = None
        self._prefixes: list[str] | None = None

    def text(self) -> str:
        """Return the lines of the series."""
        if self._text is None:
            if self._prefixes is None:
                self._prefixes = self._line_prefixes(self._name, self._labels)
            self._text = "".join([f"{p}{v!r}\n" for p, v in zip(self._prefixes, self._values(), strict=True)])
        return self._text

    def renamed_text(self, rename: Rename) -> str:
        """Return the lines with the name and the labels that `rename` returns."""
        prefixes = self._line_prefixes(*rename(self._name, self._labels))
        return "".join([f"{p}{v!r}\n" for p, v in zip(prefixes, self._values(), strict=True)])

    def _line_prefixes(self, name: str, labels: dict[str, str]) -> list[str]:
        """Return the beginnings of all lines, up to the value."""
        return [f"{name}{_braces(labels)} "]

    def _values(self) -> list[float]:
        """Return the values of all lines."""
        raise NotImplementedError


class _Value(Series):
    """A series of one number."""

    def __init__(self, name: str, labels: dict[str, str]) -> None:
        super().__init__(name, labels)
        self.value = 0.0

    def _values(self) -> list[float]:
        return [self.value]


class CounterSeries(_Value):
    """A series of a counter."""

    def inc(self, amount: float = 1) -> None:
        """Add an amount, which is not negative."""
        self.value += amount
        self._text = None


class GaugeSeries(_Value):
    """A series of a gauge."""

    def set(self, value: float) -> None:
        """Set the value."""
        self.value = float(value)
        self._text = None


class HistogramSeries(Series):
    """A series of a histogram."""

    def __init__(self, name: str, labels: dict[str, str], bounds: tuple[float, ...]) -> None:
        """`bounds` are the upper bounds of the buckets in ascending order, without infinity."""
        super().__init__(name, labels)
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value
        self._text = None

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self._counts)

    def _line_prefixes(self, name: str, labels: dict[str, str]) -> list[str]:
        bounds = [*map(repr, map(float, self._bounds)), "+Inf"]
        buckets = [f"{name}_bucket{_braces(labels | {'le': bound})} " for bound in bounds]
        return [*buckets, f"{name}_count{_braces(labels)} ", f"{name}_sum{_braces(labels)} "]

    def _values(self) -> list[float]:
        values, total = [], 0
        for count in self._counts:
            total += count
            values.append(float(total))
        return [*values, float(total), self.sum]


SeriesT = TypeVar("SeriesT", bound=Series)


class Family(Generic[SeriesT]):
    """All series of one name."""

    kind: ClassVar[str]

    def __init__(self, name: str, documentation: str, label_names: Iterable[str]) -> None:
        self.name = name
        self._documentation = documentation
        self._label_names = tuple(label_names)
        self._series: dict[tuple[str, ...], SeriesT] = {}
        self._own_head = self._head(name)

    def labels(self, *values: str) -> SeriesT:
        """Return the series with these label values; create it if it does not exist."""
        series = self._series.get(values)
        if series is None:
            labels = dict(zip(self._label_names, values, strict=True))
            series = self._series[values] = self._create(labels)
        return series

    def remove(self, *values: str) -> None:
        """Remove a series, if it exists."""
        self._series.pop(values, None)

    def clear(self) -> None:
        """Remove all series."""
        self._series.clear()

    def items(self) -> Iterator[tuple[tuple[str, ...], SeriesT]]:
        """Return the label values and the series."""
        return iter(self._series.items())

    def text(self) -> str:
        """Return the head and all series."""
        return self._own_head + "".join([series.text() for series in self._series.values()])

    def renamed_text(self, rename: Rename) -> str:
        """Return the text with the names and labels that `rename` returns."""
        name, _ = rename(self.name, {})
        return self._head(name) + "".join([series.renamed_text(rename) for series in self._series.values()])

    def _create(self, labels: dict[str, str]) -> SeriesT:
        raise NotImplementedError

    def _head(self, name: str) -> str:
        return f"# HELP {name} {self._documentation.translate(_HELP_ESCAPES)}\n# TYPE {name} {self.kind}\n"


class Counter(Family[CounterSeries]):
    """A family of counters. `_total` is added to its name."""

    kind = "counter"

    def __init__(self, name: str, documentation: str, label_names: Iterable[str]) -> None:
        super().__init__(f"{name}_total", documentation, label_names)

    def _create(self, labels: dict[str, str]) -> CounterSeries:
        return CounterSeries(self.name, labels)


class Gauge(Family[GaugeSeries]):
    """A family of gauges."""

    kind = "gauge"

    def _create(self, labels: dict[str, str]) -> GaugeSeries:
        return GaugeSeries(self.name, labels)


class Histogram(Family[HistogramSeries]):
    """A family of histograms."""

    kind = "histogram"

    def __init__(self, name: str, documentation: str, label_names: Iterable[str], buckets: Iterable[float]) -> None:
        super().__init__(name, documentation, label_names)
        self._buckets = tuple(buckets)

    def _create(self, labels: dict[str, str]) -> HistogramSeries:
        return HistogramSeries(self.name, labels, self._buckets)


AnyFamily = Counter | Gauge | Histogram


class Registry:
    """The families of a page, in the order of their creation."""

    def __init__(self) -> None:
        self._families: list[AnyFamily] = []

    def counter(self, name: str, documentation: str, label_names: Iterable[str]) -> Counter:
        """Add a family of counters."""
        return self._add(Counter(name, documentation, label_names))

    def gauge(self, name: str, documentation: str, label_names: Iterable[str]) -> Gauge:
        """Add a family of gauges."""
        return self._add(Gauge(name, documentation, label_names))

    def histogram(
        self, name: str, documentation: str, label_names: Iterable[str], buckets: Iterable[float]
    ) -> Histogram:
        """Add a family of histograms. `buckets` are upper bounds in ascending order, without infinity."""
        return self._add(Histogram(name, documentation, label_names, buckets))

    def text(self) -> str:
        """Return the page in Prometheus's text format, version 0.0.4."""
        return "".join([family.text() for family in self._families])

    def renamed_text(self, name_prefix: str, rename: Rename) -> str:
        """Return the families whose names begin with `name_prefix`, with the names and labels that `rename` returns."""
        families = [family for family in self._families if family.name.startswith(name_prefix)]
        return "".join([family.renamed_text(rename) for family in families])

    def _add(self, family: "_FamilyT") -> "_FamilyT":
        self._families.append(family)
        return family


_FamilyT = TypeVar("_FamilyT", Counter, Gauge, Histogram)


def _braces(labels: dict[str, str]) -> str:
    pairs = ",".join([f'{name}="{value.translate(_LABEL_ESCAPES)}"' for name, value in sorted(labels.items())])
    return f"{{{pairs}}}" if pairs else ""
