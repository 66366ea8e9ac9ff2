"""A tagger of texts over an LSTM, in the manner of Flax's examples of recurrent networks."""

import jax
import jax.numpy as jnp
from flax import linen as nn


class Tagger(nn.Module):
    """Gives each token a class, and counts its calls."""

    vocab_size: int
    embedding_size: int
    hidden_size: int
    classes: int
    word_dropout: float = 0.1

    @nn.compact
    def __call__(self, tokens, deterministic: bool = True):
        calls = self.variable("counters", "calls", lambda: jnp.zeros(()))
        if not self.is_initializing():
            calls.value = calls.value + 1.0
        x = nn.Embed(self.vocab_size, self.embedding_size, name="embedder")(tokens)
        x = nn.Dropout(self.word_dropout)(x, deterministic=deterministic)
        forward = nn.RNN(nn.OptimizedLSTMCell(self.hidden_size), name="forward_rnn")(x)
        backward = nn.RNN(
            nn.GRUCell(self.hidden_size), reverse=True, keep_order=True, name="backward_rnn"
        )(x)
        x = jnp.concatenate([forward, backward], axis=-1)
        x = nn.Sequential([nn.Dense(self.hidden_size), nn.tanh])(x)
        return nn.Dense(self.classes)(x)


def build():
    """Returns a small model with its variables, its inputs, and the keywords of its call."""
    tokens = jax.random.randint(jax.random.key(1), (3, 6), 0, 11)
    module = Tagger(11, 5, 4, 3)
    rngs = {"dropout": jax.random.key(2)}
    return (
        (module, module.init(jax.random.key(0), tokens)),
        (tokens,),
        {"deterministic": True, "mutable": ["counters"], "rngs": rngs},
    )
