import dataclasses
import json
import math
import reprlib
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from experiments.data.datasets import Dataset, checksum
from experiments.output.errors import UserError
from experiments.output.files import OptionalPath
from jaxbp.training.loop import Augment
from jaxbp.training.optimizers import FusedOptimizer
from jaxbp.training.precision import Policy

Loss = Callable[[nnx.Module, Array, Array], tuple[Float[Array, " batch"], Array | None]]
"""`(model, inputs, targets) -> (loss per example, predictions)`. A correct prediction equals its target. Without
predictions, the run reports its loss instead of its accuracy."""

Config = TypeVar("Config", bound="TrainingConfig")
Built = TypeVar("Built")


class Recipe(NamedTuple):
    batch_size: int
    epochs: int
    learning_rate: float


class Range(NamedTuple):
    """The finite values from `least` to `most`. If `above` is True, `least` is excluded."""

    least: float = 0
    most: float = math.inf
    above: bool = False

    def has(self, value: Any) -> bool:
        return (
            matches(value, float)
            and abs(value) < math.inf
            and self.least <= value <= self.most
            and not (self.above and value == self.least)
        )

    def __str__(self) -> str:
        if self.above:
            return f"above {self.least}"
        return f"of at least {self.least}" if math.isinf(self.most) else f"from {self.least} to {self.most}"


MOST_CHARACTERS = 4096
FILES_OF_DATA = frozenset({"data", "data_dir", "target", "text"})
FIELDS_WITHOUT_EFFECT = FILES_OF_DATA | {"run_dir", "resume", "devices", "tensor_parallel"}
"""Settings that change results by rounding at most. Other data are noticed by their checksum."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The settings that every experiment shares. An invalid value raises UserError."""

    name: ClassVar[str]
    gradient_clip: ClassVar[float | None] = None
    """Elements of the gradients are clipped to this absolute value."""
    independent: ClassVar[bool] = True
    """Whether an example's loss is independent of its batch."""
    examples: ClassVar[str] = "images"
    curves: ClassVar[tuple[str, str]] = ("train", "test")
    loss_name: ClassVar[str] = "loss"
    tensor_parallel: ClassVar[int] = 1
    """Number of devices that share each parameter, as `shardings` says."""
    steps_per_epoch: ClassVar[int | None] = None
    """The most steps per epoch. An epoch trains on other examples than the last. None: an epoch has all examples."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed for the initial parameters, the order of examples, and augmentation."""
    batch_size: Annotated[int | None, Range(1)] = None
    """Examples per step. An incomplete last batch is dropped. None: the dataset's default."""
    epochs: Annotated[int | None, Range(1)] = None
    """Number of passes over the training set. None: the dataset's default."""
    learning_rate: Annotated[float | None, Range(above=True)] = None
    """Adam's peak learning rate, between a warm-up and a cosine decay. None: the dataset's default."""
    weight_decay: Annotated[float, Range()] = 0.0
    """Weight decay of AdamW. Each step multiplies it by the learning rate."""
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = "float32"
    """Dtype of the computation. With mixed precision, parameters stay in float32."""
    target_accuracy: Annotated[float | None, Range(0, 1)] = None
    """Stop after the first epoch with at least this test accuracy. None: train all epochs."""
    devices: Annotated[int | None, Range(1)] = None
    """Number of devices that share each batch, a divisor of batch_size. None: one, or several if they are faster."""
    run_dir: OptionalPath = None
    """Directory of the run's files. None: a new folder in runs/."""
    resume: bool = False
    """Continue the run in run_dir from its last checkpoint. Only epochs may change, and only increase."""

    def __post_init__(self):
        for name, kind in annotations(type(self)).items():
            self._check_type(name, kind)
        self._check("resume", not self.resume or self.run_dir is not None, "run_dir as well, the directory of the run")
        self._fill(self.defaults())
        for name in Recipe._fields:
            self._check(
                name, getattr(self, name) is not None, f"a value, or a default from {type(self).__name__}.defaults"
            )

    @property
    def data_name(self) -> str:
        """The name of the data in the file of results."""
        return self.name

    @property
    def examples_per_device(self) -> int | None:
        """The fewest examples per GPU for which several GPUs were faster than one, or None if this was not measured.

        The class of an experiment cites the measurement.
        """
        return None

    @property
    def policy(self) -> Policy:
        return Policy.parse(self.precision)

    def is_last(self, epoch: int, test_accuracy: float | None) -> bool:
        target = self.target_accuracy
        return epoch == self.epochs or (None not in (target, test_accuracy) and test_accuracy >= target)

    def attempt(self, epoch: int) -> int:
        """Return how often training has restarted before an epoch, each time with new initial parameters."""
        return 0

    def extended(self: Config, epochs: int) -> Config:
        return dataclasses.replace(self, epochs=epochs)

    def defaults(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def build(self, key: PRNGKeyArray) -> tuple[nnx.Module, Loss]:
        raise NotImplementedError

    def load(self) -> Dataset:
        raise NotImplementedError

    def data_checksum(self, dataset: Dataset) -> str | None:
        """Return a checksum of the data that `load` returns, or None without data. A run resumes only with
        an equal checksum."""
        return checksum(*dataset[:4])

    def optimizer(self, steps: int) -> optax.GradientTransformation | FusedOptimizer | None:
        """Return the run's optimizer, or None for AdamW with this config's learning rate and weight decay."""
        return None

    def shardings(self, model: nnx.Module, mesh: Mesh, axis: str, state: PyTree) -> PyTree[NamedSharding]:
        """Return the sharding of each array in `state`, the state of a run that trains `model`. `axis` is the mesh axis
        that divides the model. It is called only if `tensor_parallel` is above 1."""
        raise NotImplementedError

    def evaluation(self, loss: Loss) -> Loss:
        return loss

    def augmentation(self) -> Augment | None:
        return None

    def repaired(self, model: nnx.Module, params: PyTree, epoch: int) -> PyTree:
        """Return the parameters to go on with after an epoch, by default the trained ones."""
        return params

    def _fill(self, settings: Mapping[str, Any]) -> None:
        for field, value in settings.items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, value)

    def _check_type(self, name: str, annotation: Any) -> None:
        kind, *notes = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
        kinds, value = alternatives(kind), getattr(self, name)
        if value is None and types.NoneType in kinds:
            return
        kinds = [each for each in kinds if each is not types.NoneType]
        if len(kinds) == 1 and get_origin(kinds[0]) is Literal:
            self._check_choice(name, get_args(kinds[0]))
        for limits in (note for note in notes if isinstance(note, Range)):
            wanted = f"{'a whole' if int in kinds else 'a finite'} number {limits}"
            self._check(name, matches(value, kind) and limits.has(value), wanted)
        self._check(name, matches(value, kind), f"a value of type {described(kind)}")
        is_long = isinstance(value, str | Path) and len(str(value)) > MOST_CHARACTERS
        self._check(name, not is_long, f"at most {MOST_CHARACTERS} characters")

    def _check(self, field: str, is_valid: bool, wanted: str) -> None:
        if not is_valid:
            raise UserError(f"{field} is {reprlib.repr(getattr(self, field))}; wants {wanted}")

    def _check_choice(self, field: str, choices: Sequence[str | None]) -> None:
        self._check(field, getattr(self, field) in choices, f"one of {', '.join(map(str, choices))}")


def to_dict(config: TrainingConfig) -> dict[str, Any]:
    """Return the settings as values of JSON. A path becomes a string, and a tuple a list."""
    return {"experiment": config.name} | {name: _to_json(value) for name, value in vars(config).items()}


def from_dict(config: type[Config], saved: Mapping[str, Any]) -> Config:
    """Invert `to_dict`. A field that `saved` lacks gets its default."""
    values, fields = dict(saved), annotations(config)
    if (name := values.pop("experiment", None)) != config.name:
        saved_name = reprlib.repr(name)
        raise UserError(f"the saved settings are of the experiment {saved_name}; wants settings of {config.name}")
    if unknown := values.keys() - fields.keys():
        raise UserError(
            f"this version of jaxbp has no setting {', '.join(map(reprlib.repr, sorted(unknown)))}; wants the version "
            "that saved the run"
        )
    return config(**{name: _from_json(value, fields[name]) for name, value in values.items()})


def annotations(config: type[TrainingConfig]) -> dict[str, Any]:
    hints = get_type_hints(config, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(config)}


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation alone, without `Annotated`."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def is_setting(annotation: Any) -> bool:
    """Return whether `from_dict` restores values of this type from JSON."""
    for kind in alternatives(annotation):
        if get_origin(kind) is Literal or kind in (int, float, bool, str, Path, types.NoneType):
            continue
        if get_origin(kind) not in (list, tuple) or not all(
            is_setting(each) for each in get_args(kind) if each is not ...
        ):
            return False
    return True


def _to_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _from_json(value: Any, annotation: Any) -> Any:
    for kind in alternatives(annotation):
        if kind is Path and isinstance(value, str) and not matches(value, annotation):
            return Path(value)
        if (container := get_origin(kind)) in (list, tuple) and isinstance(value, list):
            kinds = get_args(kind)
            each = kinds[:1] * len(value) if container is list or kinds[1:] == (...,) else kinds
            return container(map(_from_json, value, each))
    return value


def as_json(saved: Mapping[str, Any]) -> str:
    return json.dumps(saved, indent=2) + "\n"


def differences(saved: TrainingConfig, config: TrainingConfig) -> dict[str, tuple[Any, Any]]:
    """Return the differing settings that affect results, as `{field: (saved value, new value)}`."""
    one, other = effective(saved), effective(config)
    return {field: (one[field], other[field]) for field in one if one[field] != other[field]}


def effective(config: TrainingConfig) -> dict[str, Any]:
    """Return the settings that affect results, as in `to_dict`."""
    return {field: value for field, value in to_dict(config).items() if field not in FIELDS_WITHOUT_EFFECT}


def resumed(saved: Config, config: Config) -> Config:
    """Return `saved` with the `FIELDS_WITHOUT_EFFECT` of `config`, and with more epochs if `config` has more.

    Raise UserError if another field differs.
    """
    more = saved.extended(config.epochs) if config.epochs > saved.epochs else saved
    differing = differences(dataclasses.replace(saved, epochs=more.epochs), config)
    if differing and differences(more, config):
        fields = "; ".join(f"{field}: saved {old!r}, now {new!r}" for field, (old, new) in differing.items())
        raise UserError(
            f"cannot resume {config.run_dir} with other settings ({fields}); "
            "wants the saved settings (only epochs may be larger)"
        )
    elsewhere = {field: value for field, value in vars(config).items() if field in FIELDS_WITHOUT_EFFECT}
    return dataclasses.replace(more, **elsewhere)


def build(kind: Callable[..., Built], fields: Mapping[str, Any]) -> Built:
    """Return `kind(**fields)`. Raise TypeError if a field is missing, unknown, or not of its annotated type."""
    for name, annotation in get_type_hints(kind).items():
        if name in fields and not matches(fields[name], annotation):
            raise TypeError(f"{name} is {reprlib.repr(fields[name])}; wants {described(annotation)}")
    return kind(**fields)


def matches(value: Any, annotation: Any) -> bool:
    """Return whether a value has the annotated type: a class, `Any`, a `Literal`, a union, a list, a tuple, or a dict.

    An integer is also a `float`. Booleans, infinity, NaN, and integers of more than 64 bits are no numbers.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return matches(value, args[0])
    if origin is Literal:
        return value in args
    if origin in (Union, types.UnionType):
        return any(matches(value, each) for each in args)
    if origin is list:
        return isinstance(value, list) and all(matches(item, args[0]) for item in value)
    if origin is tuple:
        kinds = args[:1] * len(value) if isinstance(value, tuple) and args[1:] == (...,) else args
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(matches, value, kinds))
    if origin is dict:
        key, content = args
        return isinstance(value, dict) and all(matches(k, key) and matches(v, content) for k, v in value.items())
    if annotation is float and isinstance(value, float):
        return math.isfinite(value)
    if annotation in (int, float):
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return annotation is Any or isinstance(value, annotation)


def described(annotation: Any) -> str:
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(map(described, get_args(annotation)))
    if annotation is types.NoneType:
        return "None"
    if get_origin(annotation) is Literal:
        return " or ".join(map(repr, get_args(annotation)))
    return annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
