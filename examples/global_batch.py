"""Data for a job whose world shrinks and grows: what a step trains on depends on its number alone.

    batches = GlobalBatches(source, rows=32, seed=0)
    batch, weights = batches.at(step, by_rows)

- The order is the seed's: every row of the source comes once an epoch, and batch s has the rows at
  places 32 s to 32 s + 31 of it. So the step is all that has to be remembered, and no row is left
  out or comes twice, whatever hosts come and go.
- Every process reads its own rows alone: those that the mesh of now puts on its devices.
- 32 rows on 3 devices are 11 each: the batch is padded to 33, by a row whose weight is 0. A loss
  that is weighed with `weights` is the mean over the same 32 rows in any world. Sums over other
  numbers of devices differ in their last digits, and in nothing else.
"""

import math

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


class GlobalBatches:
    """Batches of a source that has rows: `len(source)`, and `source[i]`, a NumPy array.

    Memory-mapped arrays are such sources, and Grain's random-access ones.

    Args:
        source: the rows.
        rows: of the global batch.
        seed: of the order.
    """

    def __init__(self, source, rows, seed=0):
        self.source, self.rows, self.seed = source, rows, seed
        self._shape = (rows, *np.shape(source[0]))
        self._orders = {}

    def places(self, step):
        """Which rows of the source batch `step` has, in order."""
        count, first = len(self.source), step * self.rows
        places = range(first, first + self.rows)
        return np.array([self._order(place // count)[place % count] for place in places])

    def at(self, step, sharding):
        """Batch `step` and its weights, as global arrays; `sharding` cuts the rows."""
        places = self.places(step)
        return spread(
            lambda rows: np.stack([self.source[int(place)] for place in places[rows]]),
            self._shape,
            sharding,
        )

    def _order(self, epoch):
        # A batch may have the end of one epoch and the beginning of the next.
        if epoch not in self._orders:
            self._orders.pop(epoch - 2, None)
            random = np.random.default_rng([self.seed, epoch])
            self._orders[epoch] = random.permutation(len(self.source))
        return self._orders[epoch]


def spread(read, shape, sharding):
    """A global batch as an array on the mesh, and the weight of each of its rows, 1 or 0.

    Args:
        read: gives the rows of these numbers, an array of integers below `shape[0]`.
        shape: of the batch, before it is padded.
        sharding: cuts the rows; its other dimensions are whole.
    """
    cut = sharding.spec[0] if sharding.spec else None
    axes = () if cut is None else (cut,) if isinstance(cut, str) else cut
    devices = math.prod(sharding.mesh.shape[axis] for axis in axes)
    numbers = np.arange(-(-shape[0] // devices) * devices)
    real = numbers < shape[0]
    numbers[~real] = 0
    batch = jax.make_array_from_callback(
        (len(numbers), *shape[1:]), sharding, lambda where: read(numbers[where[0]])
    )
    by_rows = NamedSharding(sharding.mesh, PartitionSpec(cut))
    weights = jax.make_array_from_callback(
        real.shape, by_rows, lambda where: real[where].astype(np.float32)
    )
    return batch, weights
