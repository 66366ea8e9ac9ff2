"""An agent with two models of which one is a child: what moves, what trains, what does not.

The critic is a plain attribute: not a child, so `fmap` carries it over as it is. It stays where it
is, nothing changes it, and the actor and its copies share it.
"""

import numpy as np

import fmapper
from fmapper import NotAFunctorError, array_namespace, fmap, functor, random


@functor
class Net:
    """One hidden layer with a tanh."""

    def __init__(self, key, inputs, outputs, hidden=16):
        """Draws both weights, of shape (inputs, hidden) and (hidden, outputs)."""
        first, second = random.split(key)
        self.w1 = random.glorot_uniform(first, (inputs, hidden))
        self.w2 = random.glorot_uniform(second, (hidden, outputs))

    def __call__(self, x):
        """Outputs of shape (batch, outputs)."""
        return array_namespace(x).tanh(x @ self.w1) @ self.w2


@functor(children=("actor",))
class ActorCritic:
    """An actor that is moved and trained, and a critic that stays as it is."""

    def __init__(self, actor, critic):
        """Two models of any kind."""
        self.actor, self.critic = actor, critic


class Forgetful:
    """The same without a declaration: the bug that fmapper refuses to let pass."""

    def __init__(self, actor, critic):
        """Two models of any kind."""
        self.actor, self.critic = actor, critic


def improve(agent, observations, lr=0.1):
    """One step of the actor towards actions that the critic likes."""
    # The critic is on the host, so its judgement is made there and follows the actor.
    judgement = np.sign(agent.critic(fmapper.to_numpy(observations)))
    wanted = getattr(fmapper, f"to_{fmapper.get_device(agent).backend}")(judgement)

    def loss(agent):
        return ((agent.actor(observations) - wanted) ** 2).mean()

    value, gradient = fmapper.value_and_grad(loss)(agent)
    return fmap(lambda p, g: p - lr * g, agent, gradient), float(value)


def main():
    """Moves and trains an agent, and says what has happened to its parts."""
    keys = random.split(random.key(0), 3)
    agent = ActorCritic(Net(keys[0], 4, 2), Net(keys[1], 4, 2))
    observations = random.normal(keys[2], (32, 4))

    moved = fmap(fmapper.to_torch, agent)
    print("actor:", fmapper.get_device(moved.actor), " critic:", fmapper.get_device(moved.critic))
    assert moved.critic is agent.critic
    print("state:", *fmapper.state(moved))

    there = fmapper.to_torch(observations)
    losses = []
    for _ in range(50):
        moved, loss = improve(moved, there)
        losses.append(loss)
    print(f"loss: {losses[0]:.3f}, after 50 steps {losses[-1]:.3f}")
    assert losses[-1] < losses[0]
    assert moved.critic is agent.critic

    # With both as children both move.
    both = fmap(fmapper.to_torch, {"actor": agent.actor, "critic": agent.critic})
    print("both:", fmapper.get_device(both))

    # Without a declaration nothing is left behind in silence.
    try:
        fmap(fmapper.to_torch, Forgetful(agent.actor, agent.critic))
    except NotAFunctorError as error:
        print("NotAFunctorError:", str(error).partition(". ")[0])


if __name__ == "__main__":
    main()
