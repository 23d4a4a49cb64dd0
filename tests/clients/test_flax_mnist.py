import functools

import optax
from clients.namespaces import STEPS, assert_same_losses, every_implementation, images, ours, theirs
from flax import nnx


class CNN(nnx.Module):
    def __init__(self, n, rngs):
        self.conv1 = n.Conv(1, 4, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = n.BatchNorm(4, rngs=rngs)
        self.dropout1 = n.Dropout(rate=0.025)
        self.conv2 = n.Conv(4, 6, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm2 = n.BatchNorm(6, rngs=rngs)
        self.avg_pool = functools.partial(n.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.relu = n.relu
        self.linear1 = n.Linear(24, 8, rngs=rngs)
        self.dropout2 = n.Dropout(rate=0.025)
        self.linear2 = n.Linear(8, 4, rngs=rngs)

    def __call__(self, x, rngs):
        x = self.avg_pool(self.relu(self.batch_norm1(self.dropout1(self.conv1(x), rngs=rngs))))
        x = self.avg_pool(self.relu(self.batch_norm2(self.conv2(x))))
        x = self.relu(self.dropout2(self.linear1(x.reshape(x.shape[0], -1)), rngs=rngs))
        return self.linear2(x)


def losses(n):
    x, labels = images(batch=8, size=8)
    model, dropout = CNN(n, nnx.Rngs(0)), nnx.Rngs(1)
    optimizer = nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, dropout):
        def loss(model, dropout):
            return n.softmax_cross_entropy(model(x, dropout), nnx.one_hot(labels, 4)).mean()

        value, gradients = nnx.value_and_grad(loss)(model, dropout)
        optimizer.update(model, gradients)
        return value

    return [step(model, optimizer, dropout) for _ in range(STEPS)]


@functools.cache
def expected():
    return losses(theirs())


@every_implementation
def test_losses_are_those_of_flax(implementation):
    assert_same_losses(losses(ours(implementation)), expected())
