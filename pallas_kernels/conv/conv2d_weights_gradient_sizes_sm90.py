"""Sizes and configs of the kernels in `conv2d_weights_gradient_sm90`."""

import dataclasses
import itertools
from typing import Any

from pallas_kernels.core import device
from pallas_kernels.core.layouts import LANES, OPERAND_BYTES, divisors

TILE = 64
"""Rows of the left operand that one warpgroup multiplies."""
_MAX_WARPGROUPS = 4
"""Each thread then has 128 registers."""
_MAX_COLUMNS = 160
"""Columns of a CTA's product. A thread keeps one sum per two columns, and spills registers with 144 sums."""
_MAX_STAGES = 4
"""Not tuned."""
_RESERVED_BYTES = 27 * 1024
"""Bytes of shared memory left free for barriers, sums across warps, and a reserve. Stages were tuned with it."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile per CTA: `channels` input channels, and `places` positions in each pooling window. The left operand of
    `wgmma` is x if `images_on_left`, otherwise `routed`."""

    channels: int
    places: int
    images_on_left: bool
    stages: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of arrays: K output and C input channels, P x Q pooling windows of R x S positions, N examples, and H x W
    pixels of x. In `correlate_batch`, which does not pool, a window is R rows of one column of dy, and S is 1."""

    K: int
    P: int
    Q: int
    N: int
    C: int
    H: int
    W: int
    R: int
    S: int
    dtype: Any
    config: Config

    @property
    def filter_size(self) -> tuple[int, int]:
        return self.H - self.P * self.R + 1, self.W - self.Q * self.S + 1

    @property
    def band(self) -> int:
        """Rows of x that the filters read for one row of pooling windows."""
        return self.H - self.P * self.R + self.R

    @property
    def ones(self) -> int:
        """Index of the first row of ones. Ones follow x's rows in shared memory. Their product with `routed`
        yields db."""
        return self.config.channels * self.band * self.W

    @property
    def routed_rows(self) -> int:
        return self.config.places * self.K * self.Q

    @property
    def warpgroups(self) -> int:
        return -(-(self.ones + 8) // TILE) if self.config.images_on_left else self.routed_rows // TILE

    @property
    def columns(self) -> int:
        return self.routed_rows if self.config.images_on_left else self.ones + 8

    @property
    def taps(self) -> int:
        return self.config.channels * self.filter_size[0] * self.filter_size[1]

    @property
    def vectors(self) -> int:
        return -(-(self.taps + 1) * self.K // LANES)

    @property
    def x_rows(self) -> int:
        return self.warpgroups * TILE if self.config.images_on_left else self.columns

    @property
    def gradient_rows(self) -> int:
        raise NotImplementedError

    @property
    def stage_bytes(self) -> int:
        raise NotImplementedError

    @property
    def other_bytes(self) -> int:
        return 0

    @property
    def stages(self) -> int:
        left = device.target().shared_bytes - _RESERVED_BYTES - self.other_bytes
        return min(_MAX_STAGES, left // self.stage_bytes)

    @property
    def shares(self) -> tuple[int, int]:
        return self.C // self.config.channels, self.R * self.S // self.config.places

    @property
    def examples(self) -> int:
        return OPERAND_BYTES // self.dtype.itemsize

    @property
    def units(self) -> int:
        return self.P * (self.N // self.examples)

    def per_split(self, multiprocessors: int) -> int:
        splits = min(self.units, -(-multiprocessors // (self.shares[0] * self.shares[1])))
        return -(-self.units // splits)

    def fit(self) -> bool:
        return (
            1 <= self.warpgroups <= _MAX_WARPGROUPS
            and self.columns <= _MAX_COLUMNS
            and (self.config.images_on_left or self.routed_rows % TILE == 0)
            and self.gradient_rows % (8 * self.warpgroups) == 0
            and self.stages >= 2
        )

    def clocks(self) -> int:
        """Estimated clock cycles for one row of pooling windows and one block of examples, summed
        over the CTAs."""
        # Two per column of products, one per 24 loaded bytes.
        clocks = self.warpgroups * self.columns * OPERAND_BYTES // 64 + self.stage_bytes // 24
        return clocks * self.shares[0] * self.shares[1]


class _PooledSizes(Sizes):
    @property
    def gradient_rows(self) -> int:
        return self.K * self.Q

    @property
    def stage_bytes(self) -> int:
        return OPERAND_BYTES * (self.x_rows + self.gradient_rows) + self.gradient_rows * self.examples

    @property
    def other_bytes(self) -> int:
        return OPERAND_BYTES * 2 * self.routed_rows


class _ConvolutionSizes(Sizes):
    @property
    def gradient_rows(self) -> int:
        return self.routed_rows

    @property
    def stage_bytes(self) -> int:
        return OPERAND_BYTES * (self.x_rows + self.routed_rows)

    def fit(self) -> bool:
        # dy is copied one channel at a time, in whole tiles of eight rows.
        return self.config.places * self.Q % 8 == 0 and super().fit()


def pooled_sizes(dy: Any, x: Any, window: tuple[int, int], config: Config) -> Sizes:
    return _PooledSizes(*dy.shape, *x.shape[:3], *window, dy.dtype, config)


def convolution_sizes(dy: Any, x: Any, rows: int, config: Config) -> Sizes:
    K, out_rows, Q, N = dy.shape
    return _ConvolutionSizes(K, out_rows // rows, Q, N, *x.shape[:3], rows, 1, dy.dtype, config)


def cheapest_config(sizes: Any) -> Config | None:
    shapes = sizes(Config(1, 1, True, 0))
    if any(
        rows % 8 for rows in (shapes.K * shapes.Q, shapes.band * shapes.W, shapes.R * shapes.W, shapes.H * shapes.W)
    ):
        return None
    candidates = (
        sizes(Config(channels, places, images_on_left, 0))
        for channels, places, images_on_left in itertools.product(
            divisors(shapes.C), divisors(shapes.R * shapes.S), (False, True)
        )
    )
    best = min((candidate for candidate in candidates if candidate.fit()), key=Sizes.clocks, default=None)
    return best and dataclasses.replace(best.config, stages=best.stages)
