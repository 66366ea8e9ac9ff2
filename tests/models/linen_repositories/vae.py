"""A variational autoencoder that draws its codes, in the manner of Flax's example."""

import jax
import jax.numpy as jnp
from flax import linen as nn


class Encoder(nn.Module):
    latents: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8, name="fc1")(x))
        return nn.Dense(self.latents, name="fc2_mean")(x), nn.Dense(
            self.latents, name="fc2_logvar"
        )(x)


class Decoder(nn.Module):
    features: int

    @nn.compact
    def __call__(self, z):
        z = nn.relu(nn.Dense(8, name="fc1")(z))
        return nn.Dense(self.features, name="fc2")(z)


def reparameterize(rng, mean, logvar):
    std = jnp.exp(0.5 * logvar)
    eps = jax.random.normal(rng, logvar.shape)
    return mean + eps * std


class VAE(nn.Module):
    """Encodes, draws and decodes."""

    latents: int = 3
    features: int = 10

    def setup(self):
        self.encoder = Encoder(self.latents)
        self.decoder = Decoder(self.features)

    def __call__(self, x, train: bool = False):
        mean, logvar = self.encoder(x)
        z = reparameterize(self.make_rng("dropout"), mean, logvar) if train else mean
        recon_x = self.decoder(z)
        return recon_x, mean, logvar

    def generate(self, z):
        return nn.sigmoid(self.decoder(z))


def build():
    """Returns a small model with its variables, its inputs, and the keywords of its call."""
    x = jax.random.normal(jax.random.key(1), (4, 10))
    module = VAE()
    variables = module.init(jax.random.key(0), x)
    return (module, variables), (x,), {"rngs": {"dropout": jax.random.key(2)}}
