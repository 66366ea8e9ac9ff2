"""Language models of cells with matrix memories and of cells with exponential gates."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class xLSTMConfig:
    vocab_size: int = 100
    embedding_dim: int = 32
    num_blocks: int = 4
    num_heads: int = 4
    conv1d_kernel_size: int = 4
    proj_factor: float = 2.0
    slstm_at: list[int] = field(default_factory=lambda: [1])
    dropout: float = 0.0
    bias: bool = False


class CausalConv1d(nn.Module):
    """Implements causal depthwise convolution of a time series tensor."""

    def __init__(self, feature_dim, kernel_size=4, causal_conv_bias=True):
        super().__init__()
        self.kernel_size = kernel_size
        self.pad = kernel_size - 1  # padding of this size assures temporal causality.
        self.conv = nn.Conv1d(
            in_channels=feature_dim,
            out_channels=feature_dim,
            kernel_size=kernel_size,
            padding=self.pad,
            groups=feature_dim,
            bias=causal_conv_bias,
        )

    def forward(self, x):
        y = x.transpose(2, 1)  # (B, F, T) tensor - now in the right shape for conv layer.
        y = self.conv(y)  # (B, F, T+pad) tensor
        return y[:, :, : -self.pad].transpose(2, 1)


class LayerNorm(nn.Module):
    """LayerNorm but with an optional bias and a residual weight."""

    def __init__(self, ndim=-1, weight=True, bias=False, eps=1e-5, residual_weight=True):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ndim)) if weight else None
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None
        self.eps = eps
        self.residual_weight = residual_weight
        self.ndim = ndim

    @property
    def weight_proxy(self):
        if self.weight is None:
            return None
        if self.residual_weight:
            return 1.0 + self.weight
        else:
            return self.weight

    def forward(self, input):
        return F.layer_norm(
            input,
            normalized_shape=(self.ndim,),
            weight=self.weight_proxy,
            bias=self.bias,
            eps=self.eps,
        )


class MultiHeadLayerNorm(LayerNorm):
    def forward(self, input):
        assert input.dim() == 4, "Input must be 4D tensor (B, NH, S, DH)"
        B, NH, S, DH = input.shape

        gn_in_1 = input.transpose(1, 2)  # (B, S, NH, DH)
        gn_in_2 = gn_in_1.reshape(B * S, NH * DH)  # (B * S, NH * DH)
        out = F.group_norm(
            gn_in_2,
            num_groups=NH,
            weight=self.weight_proxy,
            bias=self.bias,
            eps=self.eps,
        )
        # (B * S), (NH * DH) -> (B, S, NH, DH) -> (B, NH, S, DH)
        out = out.view(B, S, NH, DH).transpose(1, 2)
        return out


def parallel_stabilized_simple(queries, keys, values, igate_preact, fgate_preact, eps=1e-6):
    """This is the mLSTM cell in parallel form."""
    B, NH, S, DH = queries.shape
    _dtype, _device = queries.dtype, queries.device

    # forget gate matrix
    log_fgates = torch.nn.functional.logsigmoid(fgate_preact)  # (B, NH, S, 1)
    ltr = torch.tril(torch.ones((S, S), dtype=torch.bool, device=_device))
    log_fgates_cumsum = torch.cat(
        [
            torch.zeros((B, NH, 1, 1), dtype=_dtype, device=_device),
            torch.cumsum(log_fgates, dim=-2),
        ],
        dim=-2,
    )  # (B, NH, S+1, 1)
    # for each batch/head this is a matrix (S+1, S+1) with the cumsum of the log gates
    rep_log_fgates_cumsum = log_fgates_cumsum.repeat(1, 1, 1, S + 1)  # (B, NH, S+1, S+1)
    # Now in each row cut off / subtract the forgetgate values of the later timesteps
    _log_fg_matrix = rep_log_fgates_cumsum - rep_log_fgates_cumsum.transpose(-2, -1)
    # Causal masking & selection of the correct submatrix
    log_fg_matrix = torch.where(ltr, _log_fg_matrix[:, :, 1:, 1:], -float("inf"))  # (B, NH, S, S)

    # gate decay matrix D (combination of forget gate and input gate)
    log_D_matrix = log_fg_matrix + igate_preact.transpose(-2, -1)  # (B, NH, S, S)
    # D matrix stabilization
    max_log_D, _ = torch.max(log_D_matrix, dim=-1, keepdim=True)  # (B, NH, S, 1)
    log_D_matrix_stabilized = log_D_matrix - max_log_D  # (B, NH, S, S)
    D_matrix = torch.exp(log_D_matrix_stabilized)  # (B, NH, S, S)

    keys_scaled = keys / math.sqrt(DH)

    # combination matrix C
    qk_matrix = queries @ keys_scaled.transpose(-2, -1)  # (B, NH, S, S)
    C_matrix = qk_matrix * D_matrix  # (B, NH, S, S)
    normalizer = torch.maximum(C_matrix.sum(dim=-1, keepdim=True).abs(), torch.exp(-max_log_D))
    # (B, NH, S, S)
    C_matrix_normalized = C_matrix / (normalizer + eps)

    # retrieved values
    h_tilde_state = C_matrix_normalized @ values  # (B, NH, S, DH)

    return h_tilde_state


class mLSTMCell(nn.Module):
    def __init__(self, embedding_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.igate = nn.Linear(3 * embedding_dim, num_heads)
        self.fgate = nn.Linear(3 * embedding_dim, num_heads)
        self.outnorm = MultiHeadLayerNorm(ndim=embedding_dim, weight=True, bias=False)
        self.reset_parameters()

    def forward(self, q, k, v):
        B, S, _ = q.shape  # (B, S, H)

        if_gate_input = torch.cat([q, k, v], dim=-1)
        q = q.view(B, S, self.num_heads, -1)  # (B, S, NH, DH)
        k = k.view(B, S, self.num_heads, -1)  # (B, S, NH, DH)
        v = v.view(B, S, self.num_heads, -1)  # (B, S, NH, DH)

        q = q.transpose(1, 2)  # (B, NH, S, DH)
        k = k.transpose(1, 2)  # (B, NH, S, DH)
        v = v.transpose(1, 2)  # (B, NH, S, DH)

        # compute input and forget gate pre-activations
        igate_preact = self.igate(if_gate_input)  # (B, S, NH)
        igate_preact = igate_preact.transpose(-1, -2).unsqueeze(-1)  # (B, NH, S, 1)
        fgate_preact = self.fgate(if_gate_input)  # (B, S, NH)
        fgate_preact = fgate_preact.transpose(-1, -2).unsqueeze(-1)  # (B, NH, S, 1)#

        h_state = parallel_stabilized_simple(q, k, v, igate_preact, fgate_preact)

        h_state_norm = self.outnorm(h_state)  # (B, NH, S, DH)
        h_state_norm = h_state_norm.transpose(1, 2).reshape(B, S, -1)
        return h_state_norm

    def reset_parameters(self):
        self.outnorm.weight.data.zero_()
        # forget gate initialization
        torch.nn.init.zeros_(self.fgate.weight)
        self.fgate.bias.data.copy_(torch.linspace(3.0, 6.0, self.num_heads))
        # input gate initialization
        torch.nn.init.zeros_(self.igate.weight)
        torch.nn.init.normal_(self.igate.bias, mean=0.0, std=0.1)


class mLSTMLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        inner_dim = int(config.proj_factor * config.embedding_dim)
        self.proj_up = nn.Linear(config.embedding_dim, 2 * inner_dim, bias=config.bias)
        self.q_proj = nn.Linear(inner_dim, inner_dim, bias=config.bias)
        self.k_proj = nn.Linear(inner_dim, inner_dim, bias=config.bias)
        self.v_proj = nn.Linear(inner_dim, inner_dim, bias=config.bias)

        self.conv1d = CausalConv1d(inner_dim, kernel_size=config.conv1d_kernel_size)
        self.conv_act_fn = nn.SiLU()
        self.mlstm_cell = mLSTMCell(inner_dim, config.num_heads)
        self.ogate_act_fn = nn.SiLU()

        self.learnable_skip = nn.Parameter(torch.ones(inner_dim, requires_grad=True))

        self.proj_down = nn.Linear(inner_dim, config.embedding_dim, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        # up-projection
        x_inner = self.proj_up(x)
        x_mlstm, z = torch.split(x_inner, x_inner.shape[-1] // 2, dim=-1)

        # mlstm branch
        x_mlstm_conv = self.conv1d(x_mlstm)
        x_mlstm_conv_act = self.conv_act_fn(x_mlstm_conv)

        q = self.q_proj(x_mlstm_conv_act)
        k = self.k_proj(x_mlstm_conv_act)
        v = self.v_proj(x_mlstm)

        h_tilde_state = self.mlstm_cell(q=q, k=k, v=v)

        h_tilde_state_skip = h_tilde_state + (self.learnable_skip * x_mlstm_conv_act)

        # output / z branch
        h_state = h_tilde_state_skip * self.ogate_act_fn(z)

        # down-projection
        y = self.dropout(self.proj_down(h_state))
        return y


class sLSTMLayer(nn.Module):
    """Cells with exponential gates that mix the memories of each head."""

    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_heads
        self.head_dim = config.embedding_dim // config.num_heads
        self.gates = nn.Linear(config.embedding_dim, 4 * config.embedding_dim)
        self.recurrent = nn.Parameter(
            torch.randn(4, self.num_heads, self.head_dim, self.head_dim) / self.head_dim
        )
        self.group_norm = MultiHeadLayerNorm(ndim=config.embedding_dim)
        self.dropout = nn.Dropout(config.dropout)

    def step(self, x, state):
        h, c, n, m = state
        recurrent = torch.einsum("bhd,ghde->gbhe", h, self.recurrent)
        i, f, z, o = x + recurrent
        log_f = F.logsigmoid(f)
        m_new = torch.max(log_f + m, i)
        i_gate = torch.exp(i - m_new)
        f_gate = torch.exp(log_f + m - m_new)
        c = f_gate * c + i_gate * torch.tanh(z)
        n = f_gate * n + i_gate
        h = torch.sigmoid(o) * c / n
        return h, c, n, m_new

    def forward(self, x):
        B, S, D = x.shape
        gates = self.gates(x).view(B, S, 4, self.num_heads, self.head_dim).permute(1, 2, 0, 3, 4)
        zeros = torch.zeros(B, self.num_heads, self.head_dim, device=x.device, dtype=x.dtype)
        state = (zeros, zeros, zeros, zeros)
        outputs = []
        for t in range(S):
            state = self.step(gates[t], state)
            outputs.append(state[0])
        y = torch.stack(outputs, dim=1)  # (B, S, NH, DH)
        y = self.group_norm(y.transpose(1, 2))
        return self.dropout(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up_proj_dim = int(4 / 3 * config.embedding_dim)
        self.proj_up = nn.Linear(config.embedding_dim, 2 * self.up_proj_dim, bias=config.bias)
        self.proj_down = nn.Linear(self.up_proj_dim, config.embedding_dim, bias=config.bias)

    def forward(self, x):
        gate_preact, up_proj = self.proj_up(x).split(self.up_proj_dim, dim=-1)
        return self.proj_down(F.gelu(gate_preact) * up_proj)


class xLSTMBlock(nn.Module):
    def __init__(self, config, block_idx):
        super().__init__()
        self.xlstm_norm = LayerNorm(ndim=config.embedding_dim, weight=True, bias=False)
        if block_idx in config.slstm_at:
            self.xlstm = sLSTMLayer(config)
            self.ffn_norm = LayerNorm(ndim=config.embedding_dim, weight=True, bias=False)
            self.ffn = FeedForward(config)
        else:
            self.xlstm = mLSTMLayer(config)
            self.ffn_norm = None
            self.ffn = None

    def forward(self, x):
        x = x + self.xlstm(self.xlstm_norm(x))
        if self.ffn is not None:
            x = x + self.ffn(self.ffn_norm(x))
        return x


class xLSTMLMModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.embedding_dim)
        self.blocks = nn.ModuleList(
            [xLSTMBlock(config, block_idx) for block_idx in range(config.num_blocks)]
        )
        self.post_blocks_norm = LayerNorm(ndim=config.embedding_dim)
        self.lm_head = nn.Linear(config.embedding_dim, config.vocab_size, bias=False)

    def forward(self, idx):
        x = self.token_embedding(idx)
        for block in self.blocks:
            x = block(x)
        x = self.post_blocks_norm(x)
        return self.lm_head(x)


def build():
    config = xLSTMConfig(vocab_size=29, embedding_dim=16, num_blocks=2, num_heads=2)
    return xLSTMLMModel(config), (torch.randint(0, 29, (2, 6)),)
