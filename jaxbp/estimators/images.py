"""The estimator for images."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jaxbp.estimators.tables import Classifier
from jaxbp.estimators.training import Network
from jaxbp.logic.circuits.convolutional_circuit import image_shape
from jaxbp.logic.networks.logic_conv import LogicConvolution, check_convolutions, halving_convolutions
from jaxbp.logic.tables.quantizer import Quantizer


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class LogicConvClassifier(Classifier):
    """A classifier for images that learns convolutions of logic gates.

    Rows are flattened images `(channels, height, width)`. The circuit reads, for each channel, one plane of bits per
    threshold: whether a pixel is above the threshold.

    Attributes:
      classes_, quantizer_, n_iter_: as in `LogicClassifier`.
      circuit_: a `ConvolutionalCircuit`.

    Source: as in `jaxbp.logic_conv2d`.
    """

    image_shape: Sequence[int]
    """(height, width), or (channels, height, width)."""
    convolutions: Sequence[LogicConvolution] | None = None
    """The convolutions. A `LogicNetwork` follows them. None: convolutions that halve the images until their height and
    width are below 4. The first has 128 kernels for images of fewer than 256 pixels, else 32. Each of the others has
    four times as many kernels as the one before it, at most 512."""
    gates: int = 400
    layers: int = 2
    """Number of layers of gates after the convolutions."""
    thresholds: int = 7
    """Largest number of thresholds per channel."""
    tau: float = 10.0
    """Divisor of the scores, as in `LogicClassifier`."""

    _allows_nan = False

    @property
    def _shape(self):
        if not isinstance(self.image_shape, Iterable):
            wanted = "(height, width), or (channels, height, width)"
            raise TypeError(f"{type(self).__name__}: image_shape is {self.image_shape!r}; wants {wanted}")
        shape = tuple(self.image_shape)
        return image_shape(type(self).__name__, (1, *shape) if len(shape) == 2 else shape)

    def check_parameters(self):
        super().check_parameters()
        self._shape  # noqa: B018
        if self.convolutions is not None:
            check_convolutions(type(self).__name__, self.convolutions)
        if not (self.categorical_features is None or str(self.categorical_features) == "from_dtype"):
            wanted = '"from_dtype" or None, because pixels are numbers'
            raise ValueError(
                f"{type(self).__name__}: categorical_features is {self.categorical_features!r}; wants {wanted}"
            )

    def checked(self, X, y, sample_weight, reset, numeric):
        rows, y, weights = super().checked(X, y, sample_weight, reset, numeric)
        if rows.shape[1] != math.prod(self._shape):
            raise ValueError(
                f"{type(self).__name__}: rows have {rows.shape[1]} features; wants {math.prod(self._shape)}, the "
                f"number of pixels of image_shape {self.image_shape}"
            )
        return rows, y, weights

    def quantizer_of(self, rows, weights):
        return Quantizer.of_images(rows, weights, self.thresholds, self._shape)

    def network(self, groups):
        _, height, width = self._shape
        shape = (len(self.quantizer_) // (height * width), height, width)
        convolutions, last = self.convolutions, groups * self.gates
        if convolutions is None:
            convolutions = halving_convolutions(height, width, 128 if height * width < 256 else 32, 512)
        convolutions = tuple(LogicConvolution(*_tuples(convolution)) for convolution in convolutions)
        widths = (last,) * self.layers
        options = dict(arity=self.arity, candidates=self.candidates)
        return Network(len(self.quantizer_), widths, groups, shape, convolutions, **options)

    def network_bits(self, bits):
        _, height, width = self._shape
        return bits.reshape(len(bits), -1, height, width)

    def circuit_of(self, made, params, simplify=True):
        return made.harden(params)


def _tuples(value):
    """Return `value` with tuples instead of lists, which have no hash."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
