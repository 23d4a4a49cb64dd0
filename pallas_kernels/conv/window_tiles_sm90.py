import dataclasses
from typing import Any, Self

from pallas_kernels.core.layouts import quotient

EXAMPLES = 64
"""Examples per tile. With 64 features, a thread then has 32 sums per window position."""
MAX_BOX = 256
"""Maximum elements along each axis of a bulk copy."""
BARRIER_BYTES = 1024
"""Shared memory for the barriers. Operands are aligned to 1024 bytes."""


@dataclasses.dataclass(frozen=True)
class WindowTiles:
    """Tiles of `config.rows` x `config.columns` pooling windows. There are K output and C input channels, P x Q windows
    of R x S positions, N examples, and filters of F x G elements."""

    K: int
    P: int
    Q: int
    N: int
    C: int
    F: int
    G: int
    R: int
    S: int
    config: Any

    @classmethod
    def from_shapes(cls, x: Any, w: Any, window: tuple[int, int], config: Any) -> Self:
        (_, H, W, N), (K, C, F, G), (R, S) = x.shape, w.shape, window
        return cls(K, (H - F + 1) // R, (W - G + 1) // S, N, C, F, G, R, S, config)

    @property
    def patch(self) -> tuple[int, int]:
        return self.config.rows * self.R + self.F - 1, self.config.columns * self.S + self.G - 1

    @property
    def tiles(self) -> tuple[int, int]:
        return self.P // self.config.rows, self.Q // self.config.columns

    @property
    def units(self) -> int:
        return self.tiles[0] * self.tiles[1] * (self.N // EXAMPLES)

    def unit(self, number: Any) -> tuple[Any, Any, Any]:
        """Return the row and column of the first window in unit `number`, and its block of 64 examples. A unit is one
        tile of windows for one block. Consecutive units share a block, so that concurrent CTAs read the same images
        from the L2 cache."""
        tile_rows, tile_columns = self.tiles
        row = quotient(number, tile_columns)
        column, block = number - row * tile_columns, quotient(row, tile_rows)
        return (row - block * tile_rows) * self.config.rows, column * self.config.columns, block
