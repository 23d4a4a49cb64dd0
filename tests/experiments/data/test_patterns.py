import numpy as np
from cells import life_step

from experiments.data import patterns


def test_a_checkerboards_squares_are_of_2_x_2_cells():
    assert patterns.checkerboard(3, 6)[..., 0].astype(int).tolist() == [
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 1],
    ]


def test_drawings_fill_their_grid_and_no_cell_has_two_colors():
    lizard, letter = patterns.lizard(), patterns.letter()
    assert (lizard.shape, letter.shape) == ((20, 20, 1), (16, 16, 3))
    assert 60 < lizard.sum() < 200
    assert letter.sum(axis=-1).max() == 1 and (letter.sum(axis=(0, 1)) > 15).all()
    for picture in (lizard, letter):
        rows, columns = np.nonzero(picture.any(axis=-1))
        assert min(rows.min(), columns.min()) > 0


def test_the_game_of_life_is_that_of_whole_numbers():
    boards = np.random.default_rng(0).random((2, 3, 7)) < 0.4
    assert np.array_equal(patterns.life_step(boards), life_step(boards, periodic=True))
