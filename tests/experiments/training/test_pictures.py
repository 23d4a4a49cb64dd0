import io

import numpy as np
import pytest
from cells import checkerboard, checkerboard_target, random_circuit
from matplotlib import figure, image
from PIL import Image, ImageColor

from experiments.output.pages import COLORS, PALETTES
from experiments.training import pictures
from experiments.training.pictures import GIF_PIXELS, animation, picture, strip, with_square_destroyed, write_pictures
from jaxbp import CellularCircuit
from jaxbp.training.loop import Metrics


@pytest.fixture
def drawn(monkeypatch):
    figures, save = [], figure.Figure.savefig

    def remember(self, *args, **options):
        figures.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(figure.Figure, "savefig", remember)
    return figures


def metrics_of(*test_accuracies, **scaling):
    fields = dict.fromkeys(Metrics._fields, 1.0) | {"loss_scale": None, "skipped_steps": 0} | scaling
    lines = enumerate(test_accuracies, start=1)
    return [Metrics(**(fields | {"epoch": epoch, "test_accuracy": accuracy})) for epoch, accuracy in lines]


def with_mistakes(dataset, wrong):
    predictions = np.array(dataset.test_labels)
    predictions[wrong] = (predictions[wrong] + 1) % 10
    return predictions


def test_a_picture_has_the_last_numbers_and_the_mistakes(toy_config, drawn):
    dataset = toy_config().load()
    predictions = with_mistakes(dataset, [3, 5])
    png = pictures.curves("a run", metrics_of(0.5, 0.9), dataset, predictions, ("relaxed train", "hardened test"))
    assert image.imread(io.BytesIO(png)).ndim == 3
    above, below = drawn[0].subfigs
    legends = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in above.axes]
    assert legends == [
        ["relaxed train (1.0000)", "hardened test (1.0000)"],
        ["relaxed train (0.0000)", "hardened test (0.1000)"],
    ]
    assert below._suptitle.get_text().startswith("2 of 37 test images are misclassified")
    titles = [axes.get_title() for axes in below.axes if axes.get_title()]
    assert titles == [f"{dataset.test_labels[i]} → {predictions[i]}" for i in (3, 5)]


def test_the_error_rate_is_on_a_logarithmic_axis_also_where_it_is_0(toy_config, drawn):
    dataset = toy_config().load()
    pictures.curves("a run", metrics_of(0.9, 1.0), dataset, None)
    error = drawn[0].subfigs[0].axes[1]
    assert (error.get_title(), error.get_yscale()) == ("error rate", "log")
    train, test = (line.get_ydata() for line in error.lines)
    np.testing.assert_allclose(train, 0.5 / 100)
    np.testing.assert_allclose(test, [0.1, 0.5 / 37])


def test_a_run_with_a_loss_scale_shows_it_and_the_steps_that_it_skipped(toy_config, drawn):
    pictures.curves("a run", metrics_of(0.9, 1.0, loss_scale=2.0**15, skipped_steps=3), toy_config().load(), None)
    axes = drawn[0].subfigs[0].axes[2]
    assert axes.get_title() == "loss scale"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["6 skipped (32,768)"]
    assert axes.lines[0].get_ydata().tolist() == [2.0**15] * 2


def test_a_run_without_accuracies_shows_its_loss(toy_config, drawn):
    pictures.curves("a run", metrics_of(None, None), toy_config().load(), None, loss_name="bits/byte")
    (axes,) = drawn[0].subfigs[0].axes
    assert axes.get_title() == "bits/byte"


@pytest.mark.parametrize(("mistakes", "rows"), [(0, 0), (1, 1), (10, 1), (11, 2), (37, 3)])
def test_a_picture_is_as_high_as_what_it_shows(toy_config, drawn, mistakes, rows):
    dataset = toy_config().load()
    png = pictures.curves("a run", metrics_of(0.9), dataset, with_mistakes(dataset, np.arange(mistakes)))
    assert len(drawn[0].subfigs) == 1 + bool(rows)
    pixels = image.imread(io.BytesIO(png))[..., :3]
    blank = np.flatnonzero(np.all(pixels == 1, axis=(1, 2)))
    longest = max(np.diff(np.flatnonzero(np.diff(blank, prepend=-2, append=2 * len(pixels)) != 1)), default=0)
    assert longest < 0.15 * len(pixels)


def random_state(*shape):
    return np.random.default_rng(0).random(shape) < 0.4


def colors_of(states, visible):
    table = np.array([ImageColor.getrgb(COLORS[name]) for name in PALETTES[visible]])
    return table[picture(states, visible)]


def frames_of(gif):
    image = Image.open(io.BytesIO(gif))
    for number in range(image.n_frames):
        image.seek(number)
        yield np.asarray(image.convert("RGB"))


@pytest.mark.parametrize("visible", [1, 2, 3])
def test_each_frame_of_a_gif_is_a_state(visible):
    states = CellularCircuit(random_circuit(3, [40, 30]), 3, True).states(random_state(1, 12, 20, 3), 6)[:, 0]
    frames = list(frames_of(animation(states, visible)))
    scale = GIF_PIXELS // 20
    assert len(frames) == 7
    for frame, expected in zip(frames, colors_of(states, visible), strict=True):
        assert frame.shape == (12 * scale, 20 * scale, 3)
        assert np.array_equal(frame[scale // 2 :: scale, scale // 2 :: scale], expected)


def test_the_first_channel_is_the_lowest_bit_of_a_color():
    state = np.array([[[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 1]]], bool)
    assert picture(state, 3).tolist() == [[0, 1, 2, 7]] and picture(state, 1).tolist() == [[0, 1, 0, 1]]
    for visible in (0, 4):
        with pytest.raises(ValueError, match=f"picture: visible is {visible}; wants 1 to 3, and at most 3"):
            picture(state, visible)


def test_a_strip_has_a_row_for_each_run_from_its_first_tick_to_its_last():
    states = np.zeros((31, 8, 8, 1), bool)
    states[0] = states[30] = True
    pictures = (strip({"a": states}), strip({"a": states, "b": ~states}))
    one, two = (np.asarray(Image.open(io.BytesIO(png)).convert("RGB")) for png in pictures)
    assert abs(two.shape[0] - 2 * one.shape[0]) <= 2 and two.shape[1] == one.shape[1]
    for png, full in ((one, [0, 7]), (two[two.shape[0] // 2 :], range(1, 7))):
        on = np.all(png == ImageColor.getrgb(COLORS["on"]), axis=-1)
        shares = [part.mean() for part in np.array_split(on, 8, axis=1)]
        assert np.flatnonzero(np.array(shares) > 0.4).tolist() == list(full), shares


def test_a_strip_shows_the_tick_trained_for_and_the_target(drawn):
    states, target = np.zeros((41, 8, 8, 1), bool), np.eye(8, dtype=bool)[..., None]
    states[10] = target
    strip({"a": states, "b": states[:5]}, 1, 10, target)
    titles = [axes.get_title() for axes in drawn[0].axes if axes.axison]
    first = ["tick 0", "tick 7", "tick 10, trained for", *(f"tick {tick}" for tick in (13, 20, 27, 33, 40)), "target"]
    assert titles == [*first, *(f"tick {tick}" for tick in range(5))]
    shown = [
        axes.images[0].get_array() for axes in drawn[0].axes if axes.get_title() in ("tick 10, trained for", "target")
    ]
    assert len(shown) == 2 and all(np.array_equal(image, target[..., 0]) for image in shown)


def test_a_destroyed_square_is_zero_and_the_rest_is_kept():
    state = np.ones((10, 7, 2), bool)
    broken = with_square_destroyed(state)
    assert state.all() and not broken[3:6, 2:5].any() and broken.sum() == 2 * (70 - 9)
    assert with_square_destroyed(state, 1).sum() == 2 * 69


def test_a_runs_pictures_are_written_and_what_was_destroyed_is_healed(tmp_path):
    written = write_pictures(tmp_path, checkerboard(), random_state(8, 8, 2), random_state(16, 16, 2), 34)
    names = ["automaton.png", "automaton.gif", "automaton_large.gif", "automaton_healing.gif"]
    assert [path.name for path in written] == names and sorted(tmp_path.iterdir()) == sorted(written)
    for name, size in (("automaton.gif", 8), ("automaton_large.gif", 16), ("automaton_healing.gif", 8)):
        first, *_, last = frames_of((tmp_path / name).read_bytes())
        scale = GIF_PIXELS // size
        target = colors_of(checkerboard_target(size, size), 1)
        assert np.array_equal(last[::scale, ::scale], target), name
        assert not np.array_equal(first[::scale, ::scale], target)
