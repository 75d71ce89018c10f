"""Batch normalization over the joined batch of several ranks: the arithmetic, once for all frameworks.

Each rank takes of its own batch, for every channel, the count of values, their mean, and the sum of their
squared deviations from it (M2), in float32 or more. These three are exchanged, and every rank combines all
ranks' in float64 and in the order of rank: statistics have the same bits everywhere. A framework supplies
the exchange and a few array operations; arithmetic operators are those of its arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

__all__ = ["BatchArrays", "BatchNormProtocol", "Moments"]

T = TypeVar("T")


class Moments(NamedTuple):
    """Moments of the joined batch for every channel, in float64."""

    count: Any
    mean: Any
    #: Sum of squared deviations from the mean.
    squares: Any
    #: ``squares / count``; zero where there are no values.
    variance: Any


@dataclass(frozen=True)
class BatchArrays(Generic[T]):
    """The operations that the arithmetic needs of a framework, besides operators.

    Args:
        total: the sum over the first axis.
        at_least_one: the larger one of each element and 1.
    """

    total: Callable[[T], T]
    at_least_one: Callable[[T], T]


class BatchNormProtocol(Generic[T]):
    """How ranks come to the statistics of their joined batch, and to their derivatives.

    Args:
        arrays: operations of the framework.

    Example::

        protocol = BatchNormProtocol(BatchArrays(lambda x: x.sum(0), lambda x: np.maximum(x, 1.0)))
        own = np.stack([np.full(c, len(x)), x.mean(0), ((x - x.mean(0)) ** 2).sum(0)])
        moments = protocol.joined(hvd.allgather(own[None]))
    """

    def __init__(self, arrays: BatchArrays[T]) -> None:
        self._arrays = arrays

    def corrected(self, count: Any, shift: Any, sums: Any, squares: Any) -> tuple[Any, Any]:
        """Mean and M2 of a rank's own values, without the rounding errors of a mean in single precision.

        The corrected two-pass algorithm of the second paper named in :meth:`joined`.

        Args:
            count: of values; float64, as all of these.
            shift: near the mean, such as the mean in single precision; 0 where there are no values.
            sums: of ``x - shift``.
            squares: of the squares of ``x - shift``.
        """
        some: Any = self._arrays.at_least_one(count)
        return shift + sums / some, squares - sums * sums / some

    def joined(self, table: Any) -> Moments:
        """Combine the ranks' counts, means and sums of squared deviations.

        With groups a and b, of n values together and means that differ by d, the update of Chan, Golub and
        LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances", 1979;
        "Algorithms for computing the sample variance: analysis and recommendations", 1983) is::

            mean = mean_a + d n_b / n        M2 = M2_a + M2_b + d^2 n_a n_b / n

        The last term is what both groups' means deviate from the common one, squared and times their counts.
        Here it is taken of all groups at once. Unlike a sum of squares, whose digits cancel where the mean
        is large, deviations lose none; an error of the mean enters squared. A group without values adds
        nothing.

        Args:
            table: float64, ``[ranks, 3, ...]``: count, mean and M2 of each rank. Where the count is 0, so
                are the others.
        """
        counts, means, squares = table[:, 0], table[:, 1], table[:, 2]
        count = self._arrays.total(counts)
        some: Any = self._arrays.at_least_one(count)
        total: Any = self._arrays.total(counts * means)
        mean = total / some
        deviations = means - mean
        combined: Any = self._arrays.total(squares + counts * deviations * deviations)
        return Moments(count, mean, combined, combined / some)

    def sent_backward(self, of_output: Any, of_product: Any, scale: Any, inverse: Any) -> tuple[Any, Any]:
        """This rank's part of the derivatives by the joined mean and by the joined variance.

        Their sums over the ranks go to :meth:`by_values`.

        Args:
            of_output: sum of the output's derivatives over this rank's values.
            of_product: the same of their products with the values' deviations from the mean.
            scale: what deviations are multiplied by: weight times ``inverse``.
            inverse: ``1 / sqrt(variance + eps)``.
        """
        return -scale * of_output, of_product * scale * inverse * inverse * -0.5

    def by_values(self, by_mean: Any, by_variance: Any, count: Any) -> tuple[Any, Any]:
        """The contribution of the statistics to the derivative by each value x of the joined batch.

        Args:
            by_mean, by_variance: derivatives of the sum of all ranks' losses.
            count: of the joined batch.

        Returns:
            Offset and slope: the contribution is ``offset + slope * (x - mean)``.
        """
        some: Any = self._arrays.at_least_one(count)
        return by_mean / some, 2.0 * by_variance / some
