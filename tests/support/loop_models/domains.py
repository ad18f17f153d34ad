"""Loops of other fields: speech, audio, handwriting, control, finance, physics, reinforcement learning."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from .case import FEATURES, UNITS, VOCAB, Family, drawn_tokens, normal, series, two_series

case = Family("domains")


@case(series(), doubles=False)
class VariationalRNN(nn.Module):
    """VRNN with torch.distributions: prior, encoder, decoder; losses summed along."""

    def __init__(self, z=4):
        super().__init__()
        self.prior, self.enc = nn.Linear(UNITS, 2 * z), nn.Linear(FEATURES + UNITS, 2 * z)
        self.dec, self.rnn = nn.Linear(z + UNITS, FEATURES), nn.GRUCell(FEATURES + z, UNITS)

    def forward(self, x):
        h, kld, nll = x.new_zeros(x.size(0), UNITS), 0, 0
        for t in range(x.size(1)):
            prior_mean, prior_std = self.prior(h).chunk(2, -1)
            mean, std = self.enc(torch.cat([x[:, t], h], 1)).chunk(2, -1)
            q = Normal(mean, F.softplus(std) + 1e-3, validate_args=False)
            p = Normal(prior_mean, F.softplus(prior_std) + 1e-3, validate_args=False)
            z = q.rsample()
            recon = self.dec(torch.cat([z, h], 1))
            kld = kld + kl_divergence(q, p).sum()
            nll = nll + F.mse_loss(recon, x[:, t], reduction="sum")
            h = self.rnn(torch.cat([x[:, t], z], 1), h)
        return kld, nll


def _strokes_and_text(batch, steps):
    return normal(batch, steps, 3), F.one_hot(drawn_tokens(batch, 8), VOCAB).float()


@case(_strokes_and_text)
class Handwriting(nn.Module):
    """Graves' soft window slides along the text: kappa only grows."""

    def __init__(self, mixtures=3):
        super().__init__()
        self.cell, self.window = nn.LSTMCell(3 + VOCAB, UNITS), nn.Linear(UNITS, 3 * mixtures)
        self.k = mixtures

    def forward(self, strokes, text):
        B, U, _ = text.shape
        u = torch.arange(U, dtype=text.dtype)
        h = c = strokes.new_zeros(B, UNITS)
        kappa, w = strokes.new_zeros(B, self.k, 1), text[:, 0]
        hs, phis = [], []
        for stroke in strokes.unbind(1):
            h, c = self.cell(torch.cat([stroke, w], 1), (h, c))
            alpha, beta, dk = self.window(h).unsqueeze(-1).exp().chunk(3, 1)
            kappa = kappa + dk
            phi = (alpha * torch.exp(-beta * (kappa - u) ** 2)).sum(1, keepdim=True)
            w = torch.bmm(phi, text).squeeze(1)
            hs.append(h)
            phis.append(phi.squeeze(1))
        return torch.stack(hs, 1), torch.stack(phis, 1)


@case(lambda batch, steps: (normal(batch, 9, UNITS), normal(batch, steps, FEATURES)))
class LocationSensitiveDecoder(nn.Module):
    """Tacotron 2: attention sees its own weights of before, summed up, through a convolution."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTMCell(FEATURES + UNITS, UNITS)
        self.query, self.memory = nn.Linear(UNITS, 8, bias=False), nn.Linear(UNITS, 8, bias=False)
        self.loc, self.loc_proj = nn.Conv1d(2, 3, 5, padding=2, bias=False), nn.Linear(3, 8, bias=False)
        self.v, self.mel = nn.Linear(8, 1, bias=False), nn.Linear(2 * UNITS, FEATURES)

    def forward(self, memory, frames):
        B, S, _ = memory.shape
        keys = self.memory(memory)
        h = c = context = memory.new_zeros(B, UNITS)
        weights = cumulative = memory.new_zeros(B, S)
        mels, alignments = [], []
        for frame in frames.transpose(0, 1):
            h, c = self.rnn(torch.cat((frame, context), -1), (h, c))
            seen = self.loc(torch.stack((weights, cumulative), 1)).transpose(1, 2)
            energies = self.v(torch.tanh(self.query(h).unsqueeze(1) + self.loc_proj(seen) + keys)).squeeze(-1)
            weights = F.softmax(energies, dim=1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            cumulative = cumulative + weights
            mels.append(self.mel(torch.cat((h, context), 1)))
            alignments.append(weights)
        return torch.stack(mels, 1), torch.stack(alignments, 1)


@case(series(), doubles=False)
class DeepAR(nn.Module):
    """Probabilistic forecasts: the future is drawn from the model's own distribution, after a loop on the past."""

    def __init__(self, horizon=4):
        super().__init__()
        self.lstm = nn.LSTM(FEATURES, UNITS, num_layers=2, batch_first=True)
        self.mu, self.sigma, self.horizon = nn.Linear(UNITS, FEATURES), nn.Linear(UNITS, FEATURES), horizon

    def forward(self, x):
        state, mus, last = None, [], None
        for t in range(x.size(1)):
            out, state = self.lstm(x[:, t : t + 1], state)
            last = self.mu(out)
            mus.append(last)
        samples = []
        for _ in range(self.horizon):
            out, state = self.lstm(last, state)
            last = self.mu(out) + F.softplus(self.sigma(out)) * torch.randn_like(last)
            samples.append(last)
        return torch.cat(mus, 1), torch.cat(samples, 1)


def _rollout(batch, steps):
    return normal(steps, batch, FEATURES), (normal(steps, batch, salt=4) > 1).float()


@case(_rollout)
class RecurrentPPO(nn.Module):
    """The agent of a single-file PPO: time first, nn.LSTM of one step, the state reset where episodes end."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(FEATURES, UNITS), nn.ReLU())
        self.lstm = nn.LSTM(UNITS, UNITS)
        self.actor, self.critic = nn.Linear(UNITS, 4), nn.Linear(UNITS, 1)

    def forward(self, x, done):
        hidden = self.network(x)
        lstm_state = (x.new_zeros(1, x.size(1), UNITS), x.new_zeros(1, x.size(1), UNITS))
        new_hidden = []
        for h, d in zip(hidden, done, strict=True):
            h, lstm_state = self.lstm(
                h.unsqueeze(0),
                ((1.0 - d).view(1, -1, 1) * lstm_state[0], (1.0 - d).view(1, -1, 1) * lstm_state[1]),
            )
            new_hidden += [h]
        new_hidden = torch.flatten(torch.cat(new_hidden), 0, 1)
        return self.actor(new_hidden), self.critic(new_hidden), lstm_state


@case(two_series)
class Imagination(nn.Module):
    """A rollout of a learned model: reward and value on the way, lambda-returns backwards, one loss."""

    def __init__(self):
        super().__init__()
        self.model, self.policy = nn.GRUCell(3, FEATURES), nn.Linear(FEATURES, 3)
        self.reward, self.value = nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1)

    def forward(self, obs, action):
        s, rewards, values = obs[:, 0], [], []
        for t in range(action.size(1)):
            s = self.model(torch.tanh(self.policy(s)) + action[:, t], s)
            rewards.append(self.reward(s))
            values.append(self.value(s))
        ret, returns = values[-1], []
        for r, v in zip(reversed(rewards), reversed(values), strict=True):
            ret = r + 0.95 * (0.1 * v + 0.9 * ret)
            returns.append(ret)
        returns.reverse()
        return torch.stack(returns, 1)


@case(series(1))
class BiquadFilter(nn.Module):
    """A learnable second-order filter, direct form II transposed, sample by sample."""

    def __init__(self):
        super().__init__()
        self.b, self.a = nn.Parameter(torch.tensor([0.5, 0.2, 0.1])), nn.Parameter(torch.tensor([-0.3, 0.2]))

    def forward(self, x):
        x = x.squeeze(-1)
        s1 = s2 = torch.zeros_like(x[:, 0])
        b0, b1, b2 = self.b
        a1, a2 = torch.tanh(self.a)
        y = []
        for n in range(x.shape[-1]):
            out = b0 * x[:, n] + s1
            s1 = b1 * x[:, n] - a1 * out + s2
            s2 = b2 * x[:, n] - a2 * out
            y.append(out)
        return torch.stack(y, dim=-1)


@case(series(1))
class Compressor(nn.Module):
    """Audio dynamics: an envelope with another coefficient for rising than for falling, by torch.where."""

    def __init__(self):
        super().__init__()
        self.attack, self.release = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.tensor(2.0))
        self.threshold, self.ratio = nn.Parameter(torch.tensor(-1.0)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        level = torch.log(x.abs() + 1e-3).squeeze(-1)
        at, rt = torch.sigmoid(self.attack), torch.sigmoid(self.release)
        env = torch.zeros_like(level[:, 0])
        gains = torch.zeros_like(level)
        for n in range(level.size(1)):
            coef = torch.where(level[:, n] > env, at, rt)
            env = coef * env + (1 - coef) * level[:, n]
            gains[:, n] = -F.relu(env - self.threshold) * torch.sigmoid(self.ratio)
        return x * gains.exp().unsqueeze(-1)


@case(series(2))
class PendulumSimulator(nn.Module):
    """Symplectic steps of a system with learned constants and a learned force; angles and momenta out."""

    def __init__(self, dt=0.05):
        super().__init__()
        self.log_mass, self.log_length = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
        self.force, self.dt = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), dt

    def forward(self, control):
        q, p = torch.split(control[:, 0], 1, dim=-1)
        mass, length = self.log_mass.exp(), self.log_length.exp()
        trajectory = []
        for u in control.unbind(1):
            f = -9.81 * mass * length * torch.sin(q) + self.force(torch.cat([q, p, u], -1))
            p = p + self.dt * f
            q = q + self.dt * p / (mass * length**2)
            trajectory.append(torch.cat([torch.cos(q), torch.sin(q), p], -1))
        return torch.stack(trajectory, 1)


@case(series(3), expect="may", why="the first loop has no input of its own, only a number of steps")
class LQRController(nn.Module):
    """The Riccati recursion backwards from the goal, then the closed loop forwards with its gains."""

    def __init__(self, n=3, m=2):
        super().__init__()
        self.A, self.B = nn.Parameter(torch.eye(n) + 0.1 * torch.randn(n, n)), nn.Parameter(torch.randn(n, m))
        self.log_q, self.log_r = nn.Parameter(torch.zeros(n)), nn.Parameter(torch.zeros(m))

    def forward(self, disturbance):
        T = disturbance.size(1)
        Q, R = torch.diag(self.log_q.exp()), torch.diag(self.log_r.exp())
        P, gains = Q, []
        for _ in range(T):
            K = torch.linalg.solve(R + self.B.T @ P @ self.B, self.B.T @ P @ self.A)
            P = Q + self.A.T @ P @ (self.A - self.B @ K)
            gains.insert(0, K)
        x, xs = disturbance[:, 0], []
        for t in range(T):
            u = -x @ gains[t].T
            x = x @ self.A.T + u @ self.B.T + disturbance[:, t]
            xs.append(x)
        return torch.stack(xs, 1)


@case(series(1))
class GARCH(nn.Module):
    """Volatility by maximum likelihood: the state is a variance, the result a sum."""

    def __init__(self):
        super().__init__()
        self.omega, self.alpha, self.beta = (nn.Parameter(torch.tensor(v)) for v in (-2.0, -1.0, 1.0))

    def forward(self, returns):
        r = returns[..., 0]
        omega, alpha, beta = F.softplus(self.omega), torch.sigmoid(self.alpha) * 0.3, torch.sigmoid(self.beta) * 0.7
        var = r.var(dim=1, unbiased=False) + 1e-3
        nll = torch.zeros_like(var)
        sigmas = []
        for t in range(r.size(1)):
            nll += 0.5 * (math.log(2 * math.pi) + torch.log(var) + r[:, t] ** 2 / var)
            sigmas.append(var.sqrt())
            var = omega + alpha * r[:, t] ** 2 + beta * var
        return nll.mean(), torch.stack(sigmas, -1)


@case(series())
class ParticleFilter(nn.Module):
    """Particles as an axis of the state: weighted, soft-averaged and moved, without drawing."""

    def __init__(self, particles=5):
        super().__init__()
        self.move, self.observe = nn.GRUCell(FEATURES, UNITS), nn.Linear(UNITS + FEATURES, 1)
        self.spread = nn.Parameter(torch.randn(particles, UNITS))

    def forward(self, x):
        B, K = x.size(0), self.spread.size(0)
        h = self.spread.expand(B, K, UNITS)
        logw = x.new_full((B, K), -math.log(K))
        means = []
        for x_t in x.unbind(1):
            obs = x_t.unsqueeze(1).expand(-1, K, -1)
            h = self.move(obs.flatten(0, 1), h.flatten(0, 1)).view(B, K, UNITS)
            logw = logw + self.observe(torch.cat([h, obs], -1)).squeeze(-1)
            logw = logw - torch.logsumexp(logw, dim=1, keepdim=True)
            means.append((logw.exp().unsqueeze(-1) * h).sum(1))
        return torch.stack(means, 1), logw


def _log_signature(batch, steps):
    return torch.linspace(0, 1, steps + 1), normal(batch, steps + 1, 3)


@case(_log_signature)
class NeuralCDE(nn.Module):
    """The vector field is a matrix, multiplied by how far the path goes in each step; time is shared by all rows."""

    def __init__(self):
        super().__init__()
        self.start, self.field = (
            nn.Linear(3, UNITS),
            nn.Sequential(nn.Linear(UNITS, 16), nn.ReLU(), nn.Linear(16, 3 * UNITS)),
        )

    def forward(self, times, path):
        z = self.start(path[:, 0])
        zs = [z]
        for i in range(len(times) - 1):
            dt = times[i + 1] - times[i]
            dX = (path[:, i + 1] - path[:, i]) / dt
            f = torch.tanh(self.field(z)).view(-1, UNITS, 3)
            z = z + dt * torch.matmul(f, dX.unsqueeze(-1)).squeeze(-1)
            zs.append(z)
        return torch.stack(zs, 1)


@case(lambda batch, steps: (normal(batch, steps, 8), drawn_tokens(batch, steps), normal(batch, 3, UNITS)))
class CaptionDecoder(nn.Module):
    """Show, attend and tell: a gate on the context, dropout (at rest) before the words, a doubly stochastic loss."""

    def __init__(self):
        super().__init__()
        self.emb, self.cell = nn.Embedding(VOCAB, 8), nn.LSTMCell(8 + 8 + UNITS, UNITS)
        self.score, self.f_beta = nn.Linear(2 * UNITS, 1), nn.Linear(UNITS, UNITS)
        self.fc, self.dropout = nn.Linear(UNITS, VOCAB), nn.Dropout(0.5).eval()
        self.init_h, self.init_c = nn.Linear(UNITS, UNITS), nn.Linear(UNITS, UNITS)

    def forward(self, extra, captions, features):
        mean = features.mean(dim=1)
        h, c = self.init_h(mean), self.init_c(mean)
        embeddings = self.emb(captions)
        predictions = extra.new_zeros(captions.size(0), captions.size(1), VOCAB)
        alphas = extra.new_zeros(captions.size(0), captions.size(1), features.size(1))
        for t in range(captions.size(1)):
            pairs = torch.cat([features, h.unsqueeze(1).expand_as(features)], -1)
            alpha = self.score(pairs).squeeze(-1).softmax(-1)
            awe = torch.sigmoid(self.f_beta(h)) * (features * alpha.unsqueeze(2)).sum(dim=1)
            h, c = self.cell(torch.cat([embeddings[:, t], extra[:, t], awe], dim=1), (h, c))
            predictions[:, t, :] = self.fc(self.dropout(h))
            alphas[:, t, :] = alpha
        return predictions, ((1.0 - alphas.sum(dim=1)) ** 2).mean()
