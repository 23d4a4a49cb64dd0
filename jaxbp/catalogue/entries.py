import functools

from jaxbp.catalogue.cases import (
    ANY,
    APART,
    CLASS,
    FUSED_ANY,
    KEY,
    LABELS,
    LAYERS,
    LENET_TAIL,
    MAMBA,
    NORMALIZED_ROWS,
    POOL_ANY,
    PROJECTED_ROWS,
    SMOOTH,
    TREES,
    VOCABULARY_ROWS,
    binary_entries,
    block_cases,
    case_of,
    classifier_case,
    depthwise_case,
    gate_case,
    indices_of,
    loss_entries,
    pair_entries,
    reduction_entries,
    row_cases,
    rowwise_entries,
    tick_entries,
    token_case,
    tree_case,
    unary_entries,
    without_convention,
)
from jaxbp.catalogue.schema import BATCH, Argument, Entry, WiresArgument
from jaxbp.logic.ops import automaton_rollout, gate_layer, logic_conv2d
from jaxbp.ops.conv import avg_pool2d, conv1d, conv2d, conv2d_relu_max_pool2d, max_pool2d
from jaxbp.ops.dense import embedding, linear, linear_algebra, softmax_cross_entropy
from jaxbp.ops.dense import linear_softmax_cross_entropy as fused_loss
from jaxbp.ops.dense import mlp_softmax_cross_entropy as mlp
from jaxbp.ops.norm import batch_norm, group_norm, layer_norm, layer_norm_linear
from jaxbp.ops.pointwise import (
    activations,
    arithmetic,
    dropout,
    elementwise,
    gated_linear_unit,
    losses,
    reductions,
    rotary_embedding,
)

CATALOGUE: tuple[Entry, ...] = (
    Entry(
        conv2d.conv2d,
        case_of((2, 2, 5, 6), (3, 2, 3, 2), (3,), **ANY),
        block_cases("conv", lambda x, w, z, y: case_of(x, w, w[:1])),
    ),
    Entry(
        conv2d.conv2d_backward_input,
        case_of((2, 3, 3, 5), (3, 2, 3, 2), input_size=(5, 6), **ANY),
        block_cases("conv", lambda x, w, z, y: case_of(z, w, input_size=x[2:])),
    ),
    Entry(
        conv2d.conv2d_backward_weights,
        case_of((2, 3, 3, 5), (2, 2, 5, 6), filter_size=(3, 2), **ANY),
        block_cases("conv", lambda x, w, z, y: case_of(z, x, filter_size=w[2:])),
    ),
    Entry(conv2d.conv2d_backward_bias, case_of((2, 3, 3, 5)), block_cases("conv", lambda x, w, z, y: case_of(z))),
    *pair_entries(
        conv1d.conv1d,
        depthwise_case("NWC", BATCH, 6, 3),
        {
            "sequences": depthwise_case("NWC", BATCH, 8, 128),
            **{f"{layout} {'x'.join(map(str, size))}": depthwise_case(layout, *size) for layout, *size in MAMBA},
        },
        takes=slice(2),
    ),
    *pair_entries(
        activations.relu,
        case_of((3, 7), (3, 7)),
        {
            **block_cases("relu", lambda x, w, z, y: case_of(z, z)),
            "relu3": case_of((BATCH, 120), (BATCH, 120)),
            "relu4": case_of((BATCH, 84), (BATCH, 84)),
        },
    ),
    *(
        Entry(function, case_of(APART, **POOL_ANY), block_cases("pool", lambda x, w, z, y: case_of(z, window=2)))
        for function in (max_pool2d.max_pool2d, max_pool2d.max_pool2d_with_indices)
    ),
    Entry(
        max_pool2d.max_pool2d_backward,
        case_of((2, 2, 3, 5), indices_of(2, 2, 3, 5, below=6), input_size=(5, 6), **POOL_ANY),
        {
            **block_cases("pool", lambda x, w, z, y: case_of(y, indices_of(*y, below=4), input_size=z[2:], window=2)),
            "overlapping": case_of(
                (BATCH, 16, 4, 4),
                indices_of(BATCH, 16, 4, 4, below=9),
                input_size=(8, 8),
                window=3,
                stride=2,
                padding=1,
            ),
        },
    ),
    Entry(
        conv2d_relu_max_pool2d.conv2d_relu_max_pool2d,
        case_of((1, 2, 5, 7), (3, 2, 3, 2), (3,), **FUSED_ANY),
        block_cases("block", lambda x, w, z, y: case_of(x, w, w[:1], window=2)),
    ),
    Entry(
        conv2d_relu_max_pool2d.conv2d_relu_max_pool2d_with_indices,
        case_of((1, 2, 5, 7), (3, 2, 3, 2), (3,), **FUSED_ANY),
        {"block1": case_of((BATCH, 1, 28, 28), (6, 1, 5, 5), (6,), window=2)},
    ),
    Entry(
        conv2d_relu_max_pool2d.conv2d_relu_max_pool2d_backward,
        case_of((1, 3, 2, 2), indices_of(1, 3, 2, 2, below=7), (1, 2, 5, 7), (3, 2, 3, 2), **FUSED_ANY),
        block_cases("block", lambda x, w, z, y: case_of(y, indices_of(*y, below=5), x, w, window=2)),
    ),
    *pair_entries(
        linear.linear,
        case_of((2, 3, 4), (2, 3, 5), (4, 5), (4,)),
        {
            "fc1": case_of((BATCH, 120), (BATCH, 256), (120, 256), (120,)),
            "fc2": case_of((BATCH, 84), (BATCH, 120), (84, 120), (84,)),
            "fc3": case_of((BATCH, 10), (BATCH, 84), (10, 84), (10,)),
        },
        takes=slice(2),
    ),
    *pair_entries(
        layer_norm.layer_norm,
        case_of((2, 3, 5), (2, 3, 5), (5,), (5,)),
        row_cases(*NORMALIZED_ROWS, of=lambda hidden: case_of((BATCH, hidden), (BATCH, hidden), (hidden,), (hidden,))),
        takes=slice(2),
    ),
    *pair_entries(
        layer_norm.rms_norm,
        case_of((2, 3, 5), (2, 3, 5), (5,)),
        row_cases(
            *NORMALIZED_ROWS,
            (16384, 4096),  # cuDNN publishes times of RMSNorm for this size
            of=lambda hidden: case_of((BATCH, hidden), (BATCH, hidden), (hidden,)),
        ),
    ),
    *pair_entries(
        layer_norm_linear.layer_norm_linear,
        case_of((2, 3, 4), (2, 3, 5), (5,), (5,), (4, 5), (4,)),
        row_cases(
            *PROJECTED_ROWS,
            of=lambda hidden, out: case_of((BATCH, out), (BATCH, hidden), (hidden,), (hidden,), (out, hidden), (out,)),
        ),
        takes=slice(4),
    ),
    Entry(
        softmax_cross_entropy.softmax_cross_entropy,
        case_of((2, 3, 5), Argument((2, 3, 5), weights=True)),
        {
            "classes": case_of((BATCH, 10), CLASS),
            "weights": case_of((BATCH, 10), Argument((BATCH, 10), weights=True)),
        },
    ),
    Entry(
        softmax_cross_entropy.softmax_cross_entropy_backward,
        case_of((2, 3), (2, 3, 5), Argument((2, 3), below=5)),
        {
            "classes": case_of((BATCH,), (BATCH, 10), CLASS),
            "weights": case_of((BATCH,), (BATCH, 10), Argument((BATCH, 10), weights=True)),
        },
    ),
    Entry(
        fused_loss.linear_softmax_cross_entropy,
        case_of((2, 3, 5), (4, 5), LABELS, (4,), label_smoothing=0.1, z_loss=0.01, softcap=5.0),
        {
            "digits": classifier_case(84, 10, reduction=None),
            **row_cases(*VOCABULARY_ROWS, of=functools.partial(classifier_case, bias=False)),
        },
    ),
    Entry(
        fused_loss.linear_softmax_cross_entropy_backward,
        case_of((2, 3), (2, 3, 5), (4, 5), LABELS, (4,), label_smoothing=0.1, z_loss=0.01, reduction=None),
        {
            "digits": classifier_case(84, 10, (BATCH,), reduction=None),
            **row_cases(*VOCABULARY_ROWS, of=lambda *size: classifier_case(*size, (), bias=False)),
        },
    ),
    *(
        Entry(function, case_of((2, 3, 5), LABELS, *LAYERS), {"fc1 to fc3": case_of(*LENET_TAIL)})
        for function in (mlp.mlp_softmax_cross_entropy, mlp.mlp_softmax_cross_entropy_with_classes)
    ),
    Entry(
        mlp.mlp_softmax_cross_entropy_backward,
        case_of((2, 3), (2, 3, 5), LABELS, *LAYERS),
        {"fc1 to fc3": case_of((BATCH,), *LENET_TAIL)},
    ),
    *unary_entries(activations.leaky_relu, negative_slope=0.1),
    *pair_entries(
        activations.prelu,
        case_of((2, 3, 4), (2, 3, 4), (3, 1)),
        {"images": case_of((BATCH, 16, 8, 8), (BATCH, 16, 8, 8), (16, 1, 1))},
        like="divide",
    ),
    *unary_entries(activations.elu, alpha=0.7),
    *unary_entries(activations.sigmoid, SMOOTH),
    *unary_entries(activations.tanh, SMOOTH),
    *unary_entries(activations.gelu, SMOOTH, approximate=False),
    *unary_entries(activations.silu, SMOOTH),
    *unary_entries(activations.mish, SMOOTH),
    *unary_entries(activations.softplus, SMOOTH),
    *rowwise_entries(activations.softmax),
    *rowwise_entries(activations.log_softmax),
    *binary_entries(arithmetic.add),
    *binary_entries(arithmetic.subtract),
    *binary_entries(arithmetic.multiply),
    *binary_entries(arithmetic.divide, x2=dict(positive=True)),
    *binary_entries(arithmetic.power, x1=dict(positive=True)),
    *binary_entries(arithmetic.maximum),
    *binary_entries(arithmetic.minimum),
    *pair_entries(
        arithmetic.negative,
        case_of((2, 3, 4), (2, 3, 4)),
        {"hidden": case_of((BATCH, 1024), (BATCH, 1024))},
        takes=slice(0),
        like="relu",
    ),
    *unary_entries(elementwise.exp, SMOOTH),
    *unary_entries(elementwise.log, Argument((2, 3, 4), positive=True)),
    *unary_entries(elementwise.sqrt, Argument((2, 3, 4), positive=True)),
    *unary_entries(elementwise.abs),
    *unary_entries(elementwise.sin, SMOOTH),
    *unary_entries(elementwise.cos, SMOOTH),
    *unary_entries(elementwise.clip, min=-1.1, max=0.5),
    *pair_entries(
        linear_algebra.matmul,
        case_of((2, 2, 3, 5), (2, 1, 3, 4), (2, 4, 5)),
        {"fc1": case_of((BATCH, 120), (BATCH, 256), (256, 120))},
        like="linear",
    ),
    *pair_entries(
        linear_algebra.dot,
        case_of((2, 3, 2, 5), (2, 3, 4), (2, 4, 5)),
        {"fc1": case_of((BATCH, 120), (BATCH, 256), (256, 120))},
        like="linear",
    ),
    *pair_entries(
        linear_algebra.outer,
        case_of((6, 4), (2, 3), (4,)),
        {"columns": case_of((BATCH, 256), (BATCH,), (256,))},
        like="divide",
    ),
    *pair_entries(
        linear_algebra.transpose,
        case_of((4, 2, 3), (2, 3, 4), axes=(2, 0, 1)),
        {"images": case_of((64, BATCH, 16), (BATCH, 16, 64), axes=(2, 0, 1))},
        takes=slice(0),
        like="relu",
        kernel_dtypes=(),
    ),
    *reduction_entries(reductions.sum, axis=(0, 2), keepdims=True, dy=(1, 3, 1)),
    *reduction_entries(reductions.mean, axis=1, keepdims=False, dy=(2, 4)),
    *reduction_entries(reductions.var, axis=(-1, 0), keepdims=False, dy=(3,), ddof=1),
    *without_convention(reduction_entries(reductions.max, axis=(0, 2), keepdims=False, dy=(3,), of=dict(apart=True))),
    *without_convention(reduction_entries(reductions.min, axis=None, keepdims=False, dy=(), of=dict(apart=True))),
    *reduction_entries(reductions.logsumexp, axis=(0, 1), keepdims=True, dy=(1, 1, 4)),
    *loss_entries(losses.mean_squared_error, {}, {}, dy=lambda *shape: ()),
    *loss_entries(losses.mean_absolute_error, {}, {}, dy=lambda *shape: ()),
    *loss_entries(losses.huber, {}, {}, delta=0.8),
    *loss_entries(losses.binary_cross_entropy, dict(weights=True), dict(weights=True)),
    *loss_entries(losses.sigmoid_binary_cross_entropy, {}, dict(weights=True)),
    *loss_entries(losses.kl_divergence, {}, dict(weights=True), dy=lambda *shape: shape[:-1]),
    Entry(
        avg_pool2d.avg_pool2d,
        case_of((1, 2, 5, 6), **POOL_ANY),
        {"pool1": case_of((BATCH, 6, 24, 24), window=2)},
        like="max_pool2d",
    ),
    Entry(
        avg_pool2d.avg_pool2d_backward,
        case_of((1, 2, 3, 5), input_size=(5, 6), **POOL_ANY),
        {"pool1": case_of((BATCH, 6, 12, 12), input_size=(24, 24), window=2)},
        like="max_pool2d",
    ),
    Entry(
        avg_pool2d.global_avg_pool2d,
        case_of((2, 3, 2, 4)),
        {"images": case_of((BATCH, 16, 8, 8))},
        like="divide",
    ),
    Entry(
        avg_pool2d.global_avg_pool2d_backward,
        case_of((2, 3), input_size=(2, 4)),
        {"images": case_of((BATCH, 16), input_size=(8, 8))},
        like="divide",
    ),
    *pair_entries(
        batch_norm.batch_norm,
        case_of((4, 3, 2), (4, 3, 2), (3,), (3,)),
        {"images": case_of((BATCH, 16, 8, 8), (BATCH, 16, 8, 8), (16,), (16,))},
        takes=slice(2),
        like="divide",
    ),
    *pair_entries(
        group_norm.group_norm,
        case_of((2, 4, 3), (2, 4, 3), (4,), (4,), num_groups=2),
        {"images": case_of((BATCH, 16, 8, 8), (BATCH, 16, 8, 8), (16,), (16,), num_groups=4)},
        takes=slice(2),
        like="divide",
    ),
    *pair_entries(
        dropout.dropout,
        case_of((2, 3, 4), (2, 3, 4), KEY, rate=0.3),
        {"hidden": case_of((BATCH, 1024), (BATCH, 1024), KEY, rate=0.3)},
        takes=slice(1, None),
        like="relu",
    ),
    Entry(
        gate_layer.gate_layer,
        case_of((6, 16), WiresArgument(5, 6), (2, 3, 5)),
        {
            "4096->8192": gate_case(4096, 8192),
            "8000->8000": gate_case(8000, 8000),
        },
    ),
    Entry(
        gate_layer.gate_layer_backward,
        case_of((2, 3, 6), (6, 16), WiresArgument(6, 6), (2, 3, 6)),  # equally many gates read each input
        {"4096->8192": gate_case(4096, 8192, (BATCH, 8192))},
    ),
    *pair_entries(
        logic_conv2d.logic_conv2d,
        case_of((2, 2, 3, 4), (2, 3, 16), TREES, (2, 2, 4, 5), **ANY),
        {"mnist-m2": tree_case(64, 12, 192, (BATCH, 192, 12, 12))},
    ),
    Entry(
        logic_conv2d.logic_conv2d_or_pool2d,
        case_of((2, 3, 16), TREES, (2, 2, 4, 5), pool=(2, 1), padding=(1, 0)),
        {
            "mnist-m1": tree_case(1, 28, 64, pool=2, window=5),
            "mnist-m2": tree_case(64, 12, 192, pool=2),
            "cifar-m2": tree_case(256, 16, 1024, pool=2),
        },
    ),
    Entry(
        logic_conv2d.logic_conv2d_or_pool2d_with_indices,
        case_of((2, 3, 16), TREES, (2, 2, 4, 5), pool=(2, 1), padding=(1, 0)),
        {"mnist-m2": tree_case(64, 12, 192, pool=2)},
    ),
    Entry(
        logic_conv2d.logic_conv2d_or_pool2d_backward,
        case_of(
            *((2, 2, 2, 4), indices_of(2, 2, 2, 4, below=2)),
            *((2, 3, 16), TREES, (2, 2, 4, 5)),
            pool=(2, 1),
            padding=(1, 0),
        ),
        {
            "mnist-m2": tree_case(
                *(64, 12, 192),
                (BATCH, 192, 6, 6),
                indices_of(BATCH, 192, 6, 6, below=4),
                pool=2,
            ),
        },
    ),
    Entry(
        logic_conv2d.logic_or_pool2d,
        case_of(APART, pool=2),
        {"pool1": case_of((BATCH, 64, 24, 24), pool=2)},
    ),
    *pair_entries(
        embedding.embedding,
        case_of((2, 3, 4), Argument((2, 3), below=5), (5, 4)),
        {
            "characters": token_case(65, 384),
            **row_cases((32768, 128256, 2560), of=token_case),
        },
    ),
    *pair_entries(
        rotary_embedding.rotary_embedding,
        case_of((2, 3, 2, 4), (2, 3, 2, 4), Argument((2, 3, 1), below=50)),
        {"heads": case_of((BATCH, 16, 4, 64), (BATCH, 16, 4, 64), Argument((1, 16, 1), below=2048))},
        takes=slice(1, None),
        like="relu",
    ),
    *pair_entries(
        gated_linear_unit.gated_linear_unit,
        case_of((2, 3, 4), (2, 3, 4), (2, 3, 4), activation="gelu"),
        {"hidden": case_of((BATCH, 1024), (BATCH, 1024), (BATCH, 1024))},
        like="divide",
    ),
    *tick_entries(automaton_rollout.automaton_step),
    *tick_entries(automaton_rollout.automaton_rollout, steps=2),
)
