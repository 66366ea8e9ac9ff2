"""An agent learns to balance a pole: the actor is moved and trained, the critic stays where it is.

The actor is a child of the agent, so `fmap` takes it to torch or JAX. The critic is a plain
attribute: `fmap` carries it over as it is, and the agent and its copies share it. It judges on the
host, in NumPy, and fits itself there. The cart and the pole are NumPy, too. The actor balances for
all of the 500 steps after some ten seconds. Try `--backend jax`, `--device gpu`, `--out runs`.
"""

import argparse
import time
from pathlib import Path

import numpy as np

import fmapper
import fmapper.nn.functional as F
from fmapper import NotAFunctorError, array_namespace, fmap, functor, random, to_numpy

LONGEST = 500  # steps of an episode; the bar of CartPole-v1 is a mean of 475
DISCOUNT, TRACE = 0.99, 0.95


class CartPole:
    """Carts with a pole on each, by the equations of Barto, Sutton and Anderson (1983).

    The constants, the reward of 1 for every step and the end of an episode are those of
    CartPole-v1 of Gymnasium. The state is (position, speed, angle, angular speed).
    """

    def __init__(self, count, seed):
        """Starts `count` episodes."""
        self.rng = np.random.default_rng(seed)
        self.state = self.rng.uniform(-0.05, 0.05, (count, 4))
        self.age = np.zeros(count, int)

    def step(self, actions):
        """Pushes each cart right (1) or left (0).

        Returns the states after it, and of each cart whether its pole fell or it ran away, and
        whether its time was up. Such carts begin anew.
        """
        _, speed, angle, spin = self.state.T
        sin, cos = np.sin(angle), np.cos(angle)
        push = (np.where(actions, 10.0, -10.0) + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        shift = push - 0.05 * turn * cos / 1.1
        reached = self.state + 0.02 * np.stack([speed, shift, spin, turn], axis=1)
        self.age += 1
        fell = (np.abs(reached[:, 0]) > 2.4) | (np.abs(reached[:, 2]) > np.radians(12))
        late = ~fell & (self.age >= LONGEST)
        again = fell | late
        self.state = reached.copy()
        self.state[again] = self.rng.uniform(-0.05, 0.05, (again.sum(), 4))
        self.age[again] = 0
        return reached, fell, late


@functor
class Actor:
    """One hidden layer with a tanh: from states to the logits of both actions."""

    def __init__(self, key, hidden=32):
        """Draws both weights, of shape (4, hidden) and (hidden, 2)."""
        first, second = random.split(key)
        self.w1 = random.glorot_uniform(first, (4, hidden))
        self.w2 = 0.1 * random.glorot_uniform(second, (hidden, 2))

    def __call__(self, states):
        """Logits of shape (batch, 2)."""
        return array_namespace(states).tanh(states @ self.w1) @ self.w2


class Critic:
    """What a state is worth: a linear function of fixed features, fit by least squares."""

    def __init__(self, rng, features=64):
        """Draws the features; everything is worth nothing at first."""
        self.draw = rng.normal(size=(5, features))
        self.weights = np.zeros(features + 1)

    def features(self, states):
        """Of shape (batch, features + 1), for states of shape (batch, 4)."""
        ones = np.ones((len(states), 1))
        return np.hstack([np.tanh(np.hstack([states, ones]) @ self.draw), ones])

    def __call__(self, states):
        """Values of shape (batch,)."""
        return self.features(states) @ self.weights

    def fit(self, states, returns):
        """Fits the values to what was reached, and stays near to what it was."""
        x, near = self.features(states), 1e-3 * len(states)
        left = x.T @ x + near * np.eye(x.shape[1])
        self.weights = np.linalg.solve(left, x.T @ returns + near * self.weights)


@functor(children=("actor",))
class Agent:
    """An actor that is moved and trained, and a critic that stays where it is."""

    def __init__(self, actor, critic):
        """Two models of any kind."""
        self.actor, self.critic = actor, critic


class Forgetful:
    """The same without a declaration: the bug that fmapper refuses to let pass."""

    def __init__(self, actor, critic):
        """Two models of any kind."""
        self.actor, self.critic = actor, critic


def play(agent, carts, steps, there):
    """Lets the actor drive; returns states, actions, advantages, returns and ended episodes."""
    states, actions, values, nexts, ends, ages = [], [], [], [], [], []
    for _ in range(steps):
        state = carts.state.astype(np.float32)
        logits = to_numpy(agent.actor(there(state)))
        action = (logits + carts.rng.gumbel(size=logits.shape)).argmax(1)  # draws by softmax
        before = carts.age + 1
        reached, fell, late = carts.step(action)
        states.append(state)
        actions.append(action)
        values.append(agent.critic(state))
        nexts.append(np.where(fell, 0.0, agent.critic(reached)))
        ends.append(fell | late)
        ages.extend(before[fell | late])
    advantage, advantages = 0.0, []
    for value, after, end in zip(values[::-1], nexts[::-1], ends[::-1], strict=True):
        surprise = 1 + DISCOUNT * after - value
        advantage = surprise + DISCOUNT * TRACE * np.where(end, 0.0, advantage)
        advantages.append(advantage)
    advantages = np.concatenate(advantages[::-1])
    returns = advantages + np.concatenate(values)
    return np.concatenate(states), np.concatenate(actions), advantages, returns, ages


def loss_of(agent, states, actions, advantages):
    """Small where actions are likely that turned out better than the critic had thought."""
    xp = array_namespace(states)
    logs = F.log_softmax(agent.actor(states))
    entropy = -(xp.exp(logs) * logs).sum(-1).mean()
    return -((actions * logs).sum(-1) * advantages).mean() - 0.003 * entropy


def train(agent, carts, there, rounds=80, steps=64, lr=0.02, log=lambda *_: None):
    """Plays and learns in turns; returns the agent and the mean length of episodes per round."""
    mean = square = fmap(lambda p: 0 * p, agent)
    curve, recent = [], []
    for number in range(1, rounds + 1):
        states, actions, advantages, returns, ages = play(agent, carts, steps, there)
        agent.critic.fit(states, returns)  # on the host, for all copies of the agent
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        chosen = np.eye(2, dtype=np.float32)[actions]
        batch = there((states, chosen, scaled.astype(np.float32)))
        gradient = fmapper.grad(loss_of)(agent, *batch)
        # Adam: the moments are agents like the model itself.
        mean = fmap(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
        square = fmap(lambda v, g: 0.99 * v + 0.01 * g * g, square, gradient)
        rate = lr * (1 - 0.99**number) ** 0.5 / (1 - 0.9**number)
        agent = fmap(lambda p, m, v: p - rate * m / (v**0.5 + 1e-8), agent, mean, square)  # noqa: B023
        recent = (recent + ages)[-50:]
        curve.append(float(np.mean(recent)) if recent else 0.0)
        log(number, curve[-1])
    return agent, curve


def balance(agent, there, count=50):
    """Steps that the likeliest actions keep each of `count` poles up, of shape (count,)."""
    carts = CartPole(count, seed=1)
    lasted = np.zeros(count, int)
    for age in range(1, LONGEST + 1):
        logits = to_numpy(agent.actor(there(carts.state.astype(np.float32))))
        _, fell, late = carts.step(logits.argmax(1))
        lasted = np.where((fell | late) & (lasted == 0), age, lasted)
    return lasted


def what_moves(there):
    """Shows which parts of an agent move, and the error of one that nobody declared."""
    agent = Agent(Actor(random.key(0)), Critic(np.random.default_rng(0)))
    moved = fmap(there, agent)
    names = ", ".join(fmapper.state(moved))
    print(f"actor on {fmapper.get_device(moved.actor)}, its state: {names}")
    print(f"critic in NumPy, {'the same object' if moved.critic is agent.critic else 'a copy'}")
    try:
        fmap(there, Forgetful(agent.actor, agent.critic))
    except NotAFunctorError as error:
        print(f"without a declaration: {str(error).partition('. ')[0]}.\n")
    return moved


def draw(path, curve):
    """Saves the learning curve as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(curve) + 1), curve)
    axes.axhline(475, linestyle=":", color="C1", label="solved")
    axes.set(xlabel="round", ylabel="steps", title="CartPole: mean of the last 50 episodes")
    axes.legend()
    figure.savefig(path)


def main(arguments=None):
    """Trains an agent and shows how it learns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=["torch", "jax"], default="torch")
    parser.add_argument("--device", default="cpu", help="of the actor: cpu, gpu, cuda:1 ...")
    parser.add_argument("--rounds", type=int, default=80, help="of playing and learning")
    parser.add_argument("--out", type=Path, help="a folder for the learning curve as a picture")
    options = parser.parse_args(arguments)
    there = getattr(fmapper, f"to_{options.backend}")(device=options.device)
    agent = what_moves(there)
    critic = agent.critic

    before = balance(agent, there)
    print(f"untrained, it balances for {before.mean():.0f} steps")
    print("round  steps (mean of the last 50 episodes)")
    every = max(options.rounds // 10, 1)

    def log(number, length):
        if number % every == 0:
            print(f"{number:>5}  {length:>5.0f} {'#' * round(length / 10)}", flush=True)

    start = time.perf_counter()
    carts = CartPole(32, seed=0)
    agent, curve = train(agent, carts, there, rounds=options.rounds, log=log)
    seconds = time.perf_counter() - start
    after = balance(agent, there)
    print(
        f"\ntrained for {seconds:.0f} s, it balances for {after.mean():.0f} steps of {LONGEST}; "
        f"{(after == LONGEST).sum()} of {len(after)} poles stay up to the end"
    )
    print(f"actor on {fmapper.get_device(agent.actor)}; the critic has never moved", flush=True)
    assert agent.critic is critic
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        draw(options.out / "learning_curve.png", curve)
        print(f"Saved {options.out / 'learning_curve.png'}.")


if __name__ == "__main__":
    main()
