from pallas_kernels.dense.mlp_network_sm90 import row_widths


def test_rows_have_place_for_a_one_behind_each_hidden_layer():
    assert row_widths((256, 120, 84, 10)) == (256, 128, 96, 32)
    assert row_widths((31, 32, 32)) == (32, 64, 32)
