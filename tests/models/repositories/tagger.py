"""Tags for words by recurrent layers and characters by convolutions."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class CharCNN(nn.Module):
    def __init__(self, n_chars, char_dim, n_filters, kernel_sizes=(2, 3)):
        super().__init__()
        self.embedding = nn.Embedding(n_chars, char_dim, padding_idx=0)
        self.convs = nn.ModuleList(
            nn.Conv1d(char_dim, n_filters, k, padding=k - 1) for k in kernel_sizes
        )

    def forward(self, chars):
        b, t, c = chars.shape
        x = self.embedding(chars.view(b * t, c)).transpose(1, 2)
        x = [F.relu(conv(x)).max(dim=-1)[0] for conv in self.convs]
        return torch.cat(x, dim=-1).view(b, t, -1)


class BiLSTMTagger(nn.Module):
    def __init__(
        self,
        vocab_size,
        n_chars,
        tagset_size,
        embedding_dim=16,
        hidden_dim=24,
        num_layers=2,
        dropout=0.3,
    ):
        super().__init__()
        self.hidden_dim = hidden_dim
        self.num_layers = num_layers
        self.word_embeds = nn.Embedding(vocab_size, embedding_dim, padding_idx=0)
        self.char_cnn = CharCNN(n_chars, 6, 4)
        self.lstm = nn.LSTM(
            embedding_dim + 8,
            hidden_dim // 2,
            num_layers=num_layers,
            bidirectional=True,
            batch_first=True,
            dropout=dropout,
        )
        self.dropout = nn.Dropout(dropout)
        self.hidden2tag = nn.Linear(hidden_dim, tagset_size)
        self.init_weights()

    def init_weights(self):
        for name, param in self.lstm.named_parameters():
            if "weight_ih" in name:
                nn.init.xavier_uniform_(param.data)
            elif "weight_hh" in name:
                nn.init.orthogonal_(param.data)
            elif "bias" in name:
                param.data.fill_(0)
                # Set forget-gate bias to 1
                n = param.size(0)
                param.data[n // 4 : n // 2].fill_(1)
        nn.init.xavier_uniform_(self.hidden2tag.weight)
        self.hidden2tag.bias.data.zero_()

    def init_hidden(self, batch_size, device):
        shape = (2 * self.num_layers, batch_size, self.hidden_dim // 2)
        return torch.zeros(shape, device=device), torch.zeros(shape, device=device)

    def forward(self, sentence, chars):
        mask = (sentence != 0).float().unsqueeze(-1)
        embeds = torch.cat([self.word_embeds(sentence), self.char_cnn(chars)], dim=-1)
        hidden = self.init_hidden(sentence.size(0), sentence.device)
        lstm_out, _ = self.lstm(self.dropout(embeds), hidden)
        tag_space = self.hidden2tag(lstm_out * mask)
        return F.log_softmax(tag_space, dim=2)


def build(width=16):
    model = BiLSTMTagger(20, 11, 5, hidden_dim=width)
    inputs = torch.randint(0, 20, (2, 5)), torch.randint(0, 11, (2, 5, 4))
    return model, inputs, ((20, 11, 5), dict(hidden_dim=width))
