from pallas_kernels.dense import linear_product_sm90


def test_the_raster_walks_column_blocks_and_meets_every_tile_once():
    walked = [linear_product_sm90._raster(i, rows=3, width=2) for i in range(12)]
    assert walked == [(row, 2 * block + column) for block in range(2) for row in range(3) for column in range(2)]
