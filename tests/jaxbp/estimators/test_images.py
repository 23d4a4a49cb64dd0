import pickle
import shutil

import numpy as np
import pytest
from compiled_rows import results_in_c
from sklearn.base import clone
from sklearn.utils.estimator_checks import estimator_checks_generator

from jaxbp.estimators import LogicConvClassifier
from jaxbp.nn import LogicConvolution

SMALL = dict(
    convolutions=[LogicConvolution(8, 3, pool=2)],
    gates=60,
    layers=1,
    thresholds=2,
    tau=6.0,
    epochs=40,
    learning_rate=0.2,
    random_state=0,
)


def bars(images=320, size=6):
    """Return noisy images of a horizontal or vertical bar in two channels, as rows."""
    random = np.random.default_rng(0)
    rows, labels = random.uniform(0, 0.6, (images, 2, size, size)), random.integers(0, 2, images)
    for image, label, at in zip(rows, labels, random.integers(1, size - 1, images), strict=True):
        image.swapaxes(1, 2)[:, at] += 0.7 if label else 0
        image[:, at] += 0 if label else 0.7
    return rows.reshape(images, -1).astype(np.float32), labels


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_images_are_learned_and_compiled_c_agrees(tmp_path):
    X, y = bars()
    estimator = LogicConvClassifier(image_shape=(2, 6, 6), **SMALL).fit(X[:240], y[:240])
    assert estimator.score(X[240:], y[240:]) > 0.9
    assert np.array_equal(results_in_c(estimator.to_c(), X, tmp_path), estimator.predict_hard(X))
    copy = pickle.loads(pickle.dumps(estimator))
    assert np.array_equal(copy.predict_proba(X), estimator.predict_proba(X))
    assert copy.partial_fit(X, y).n_iter_ == 41
    assert "module circuit (" in estimator.to_verilog()


@pytest.mark.parametrize(("shape", "kernels"), [((8, 8), [128, 512]), ((3, 28, 20), [32, 128, 512])])
def test_by_default_the_convolutions_depend_on_the_size_of_the_images(shape, kernels):
    estimator = LogicConvClassifier(image_shape=shape)
    estimator.quantizer_ = range(7 * np.prod(shape))
    network = estimator.network(10)
    assert [convolution.kernels for convolution in network.convolutions] == kernels
    assert network.image == (7 * np.prod(shape[:-2], dtype=int), *shape[-2:]) and network.widths == (4000, 4000)


def test_rows_of_another_size_are_refused():
    X, y = bars(20)
    for shape, wanted in (((6, 6), "wants 36"), ((3, 6, 6), "wants 108")):
        with pytest.raises(ValueError, match=f"LogicConvClassifier: rows have 72 features; {wanted}, the number of"):
            LogicConvClassifier(image_shape=shape, **SMALL).fit(X, y)
    with pytest.raises(ValueError, match=r"LogicConvClassifier: shape is \(6,\); wants \(channels, height, width\)"):
        LogicConvClassifier(image_shape=(6,), **SMALL).fit(X, y)
    with pytest.raises(TypeError, match=r"LogicConvClassifier: image_shape is 36; wants \(height, width\), or "):
        LogicConvClassifier(image_shape=36, **SMALL).fit(X, y)
    with pytest.raises(ValueError, match=r"LogicConvClassifier: categorical_features is array\(.*; wants "):
        LogicConvClassifier(image_shape=(2, 6, 6), categorical_features=np.array([0, 1]), **SMALL).fit(X, y)
    with pytest.raises(ValueError, match="NaN"):
        LogicConvClassifier(image_shape=(2, 6, 6), **SMALL).fit(np.where(X > 0.5, np.nan, X), y)


@pytest.mark.parametrize(
    "convolutions", [3, [3], *SMALL["convolutions"], iter([])], ids=["3", "[3]", "one", "iterator"]
)
def test_convolutions_that_are_no_list_are_refused(convolutions):
    estimator = LogicConvClassifier(image_shape=(2, 6, 6), convolutions=convolutions)
    with pytest.raises(TypeError) as raised:
        estimator.fit(*bars(20))
    wanted = f"convolutions is {convolutions!r}; wants a list of jaxbp.nn.LogicConvolution"
    assert str(raised.value) == f"LogicConvClassifier: {wanted}"


def test_options_of_convolutions_may_be_lists():
    convolution = LogicConvolution(8, [3, 3], padding=[[1, 0], [0, 1]], pool=[2, 2])
    LogicConvClassifier(image_shape=(2, 6, 6), **SMALL | dict(convolutions=[convolution], epochs=1)).fit(*bars(20))


def test_checks_of_scikit_learn_that_fit_nothing_pass():
    # Most checks fit rows of two to thirty features, which have no common image_shape.
    names = {
        *("check_no_attributes_set_in_init", "check_do_not_raise_errors_in_init_or_set_param", "check_set_params"),
        *(
            "check_get_params_invariance",
            "check_estimator_repr",
            "check_estimators_unfitted",
            "check_estimator_cloneable",
        ),
        *("check_estimator_get_tags_default_keys", "check_estimator_tags_renamed", "check_valid_tag_types"),
        *("check_mixin_order", "check_parameters_default_constructible"),
    }
    estimator = LogicConvClassifier(image_shape=(1, 2), **SMALL)
    done = set()
    for checked, check in estimator_checks_generator(estimator):
        if check.func.__name__ in names:
            check(checked)
            done.add(check.func.__name__)
    assert len(done) >= 8
    assert clone(estimator).get_params() == estimator.get_params()
