import jax
import pytest
from flax import nnx

from experiments.configs.mixer import MixerConfig


def test_the_settings_are_the_models():
    config = MixerConfig(patch=14, channels=8, blocks=3, implementation="xla", precision="mixed_bfloat16")
    model = nnx.eval_shape(lambda: config.build(jax.random.key(0))[0])
    assert (model.patch, model.dtype, len(model.blocks)) == (14, "bfloat16", 3)
    assert model.embed.weight.shape == (8, 14 * 14)
    assert {block.implementation for block in model.blocks} == {"xla"}


@pytest.mark.parametrize(("setting", "value"), [("patch", 5), ("patch", 0), ("channels", 0), ("blocks", 1.5)])
def test_what_no_mixer_can_have_is_refused(setting, value):
    with pytest.raises(ValueError, match=f"{setting} is {value}; wants a"):
        MixerConfig(**{setting: value})


def test_it_learns_more_slowly_than_a_lenet():
    assert MixerConfig().learning_rate == 1e-3
    assert MixerConfig().batch_size == 16
