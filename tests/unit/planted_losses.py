"""A small trainer's loss, right, and twenty that each have the idea of one public bug. No library's code stands here.

Each is an adapter: `loss(case)`, `loss_of_logits(case)` and `advantages(case)`.
"""

from typing import Any

import torch
from torch import Tensor

from failurelab.known_gradients import LossCase, Part


class Loss:
    """Right: it accumulates micro-batches, each divided by the counts of the whole step."""

    SOURCE, CALLED = "", ""  # where a bug was public, and a word that its name must have
    REDUCES = ("token_mean", "sequence_mean", "constant", "sequence_sum")

    def ratio(self, logps: Tensor, old: Tensor, mask: Tensor, level: str) -> Tensor:
        logs = logps - old
        if level == "sequence":
            logs = (logs * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return logs.exp().expand_as(logps)

    def policy(self, ratio: Tensor, worth: Tensor, low: float, high: float) -> Tensor:
        return -torch.min(ratio * worth, ratio.clamp(1 - low, 1 + high) * worth)

    def kl(self, logps: Tensor, reference: Tensor, kind: str, way: str) -> Tensor:
        away = reference - logps
        value = {"k1": -away, "k2": away**2 / 2, "k3": torch.expm1(away) - away}[kind]
        return value + value.detach() * logps - (value.detach() * logps).detach() if way == "total" else value

    def add_kl(self, policy: Tensor, kl: Tensor, beta: float) -> Tensor:
        return policy + beta * kl

    def weigh(self, policy: Tensor, part: Part, low: float, high: float) -> Tensor:
        return policy * (part.old - part.engine).exp().clamp(low, high)

    def likelihood(self, part: Part, weight: float, right: Tensor) -> Tensor:
        return -weight * (part.logps * part.mask * (part.rewards > 0)[:, None]).sum() / right

    def divide(self, terms: Tensor, part: Part, how: str, length: int) -> Tensor:
        summed = (terms * part.mask).sum(1)
        rows = {"sequence_mean": part.mask.sum(1).clamp(min=1), "constant": length, "sequence_sum": 1}
        if how == "token_mean":
            return self.token_mean(terms, part)
        return (summed / rows[how]).sum() / part.step_rows * part.ranks

    def token_mean(self, terms: Tensor, part: Part) -> Tensor:
        return (terms * part.mask).sum() / part.step_tokens * part.ranks

    def finish(self, loss: Tensor, part: Part) -> Tensor:
        return loss

    def loss(self, case: LossCase) -> tuple[Tensor, Tensor]:
        asked, batch = case.asked, case.batch
        asked.only(objective="clip")
        how = asked.choose("reduce", {name: name for name in self.REDUCES})
        level, bounds, length = asked.ratio, (asked.epsilon_low, asked.epsilon_high), asked.max_length
        beta, kl, way, nll = asked.beta, asked.kl, asked.kl_gradient, asked.nll_weight
        engine = asked.choose("engine", {None: False, "token_truncate": True})
        limits = asked.engine_low, asked.engine_high
        right = (batch.mask * (batch.rewards > 0)[:, None]).sum()

        def micro(part: Part) -> Tensor:
            ratio = self.ratio(part.logps, part.old, part.mask, level)
            terms = self.policy(ratio, part.advantages[:, None], *bounds)
            if engine:
                terms = self.weigh(terms, part, *limits)
            if beta:
                terms = self.add_kl(terms, self.kl(part.logps, part.reference, kl, way), beta)
            loss = self.divide(terms, part, how, length)
            return self.finish(loss + part.ranks * self.likelihood(part, nll, right) if nll else loss, part)

        return case.accumulate(micro)

    def score(self, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        return (logits / temperature).log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    def loss_of_logits(self, case: LossCase) -> tuple[Tensor, Tensor]:
        asked, batch = case.asked, case.batch
        leaf = batch.logits.clone().requires_grad_()
        logps = self.score(leaf, batch.ids, asked.temperature)
        ratio = self.ratio(logps, batch.old, batch.mask, asked.ratio)
        terms = self.policy(ratio, batch.advantages[:, None], asked.epsilon_low, asked.epsilon_high)
        loss = (terms * batch.mask).sum() / batch.mask.sum()
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    def advantages(self, case: LossCase) -> Tensor:
        case.asked.only(scale="group")
        rewards, group, result = case.batch.rewards, case.batch.group, torch.zeros(8, dtype=torch.float64)
        for each in group.unique():
            result[group == each] = self.normalize(rewards[group == each])
        return result

    def normalize(self, rewards: Tensor) -> Tensor:
        return (rewards - rewards.mean()) / (rewards.std() + 1e-4) if len(rewards) > 1 else rewards * 0


class NegatedTwice(Loss):
    SOURCE, CALLED = "fla-org/flash-linear-attention#1073", "wrong sign"

    def finish(self, loss, part):
        return -loss


class K1WithoutScore(Loss):
    SOURCE, CALLED = "NVIDIA-NeMo/RL#2506", "without its score term"

    def kl(self, logps, reference, kind, way):
        return super().kl(logps, reference, kind, "pathwise")


class RatioOfItself(Loss):
    SOURCE, CALLED = "meta-pytorch/torchforge#571", "ratio is 1"

    def ratio(self, logps, old, mask, level):
        return super().ratio(logps, logps.detach(), mask, level)


class PaddingInLuspo(Loss):
    SOURCE, CALLED = "huggingface/trl#6654", "padding trained on"

    def divide(self, terms, part, how, length):
        if how != "sequence_sum":
            return super().divide(terms, part, how, length)
        return (terms * part.mask.sum(1, keepdim=True)).mean() * len(terms) / part.step_rows * part.ranks


class KlSubtracted(Loss):
    SOURCE, CALLED = "verl-project/verl#179", "KL with the wrong sign"

    def add_kl(self, policy, kl, beta):
        return policy - beta * kl


class ModeNotPassed(Loss):
    SOURCE, CALLED = "verl-project/verl#1083", "option ignored: reduce"

    def divide(self, terms, part, how, length):
        return super().divide(terms, part, "token_mean", length)


class EngineDropped(Loss):
    SOURCE, CALLED = "linkedin/Liger-Kernel#1082, huggingface/trl#5031", "option ignored: engine"

    def weigh(self, policy, part, low, high):
        return policy


class LikelihoodInert(Loss):
    SOURCE, CALLED = "NVIDIA-NeMo/RL#3792", "option ignored: nll_weight"

    def likelihood(self, part, weight, right):
        return torch.zeros((), dtype=torch.float64)


class ShareOfRows(Loss):
    SOURCE, CALLED = "verl-project/verl#906, #5625", "by share of the rows"

    def token_mean(self, terms, part):
        return (terms * part.mask).sum() / part.mask.sum() * len(terms) / part.step_rows * part.ranks


class MeanOfMeans(Loss):
    SOURCE, CALLED = "OpenRLHF/OpenRLHF#1249", "mean of means"

    def token_mean(self, terms, part):
        return (terms * part.mask).sum() / part.mask.sum() / part.micros


class OwnDenominator(MeanOfMeans):
    SOURCE = "allenai/open-instruct#1161"

    def token_mean(self, terms, part):
        each = terms[part.mask.bool()].split(int(part.mask.sum()))  # a packed row, with its own count
        return torch.stack([values.mean() for values in each]).mean() / part.micros


class ScaledByMicroBatch(MeanOfMeans):
    SOURCE = "NovaSky-AI/SkyRL#1296"

    def token_mean(self, terms, part):
        return (terms / (part.mask.sum() * part.micros) * part.mask).sum()


class RanksOwnTokens(Loss):
    SOURCE, CALLED = "PrimeIntellect-ai/prime-rl#2562", "each rank's own tokens"

    def token_mean(self, terms, part):
        return (terms * part.mask).sum() / part.rank_tokens


class DividedByWindow(Loss):
    SOURCE, CALLED = "huggingface/trl#6024", "divided by the number of micro-batches"

    def token_mean(self, terms, part):
        return super().token_mean(terms, part) / part.micros


class TokensOfTheTurn(Loss):
    SOURCE, CALLED = "huggingface/trl#7206, #7249", "mean of means, each over all ranks"

    def token_mean(self, terms, part):
        return (terms * part.mask).sum() / (part.turn_tokens / part.ranks) / part.micros


class DividedByGroup(Loss):
    SOURCE, CALLED = "modelscope/ms-swift#10117", "divided by the number of rows of a group"

    def finish(self, loss, part):
        return loss / 4


class DividedByRanks(Loss):
    SOURCE, CALLED = "hamishivi/tmax#9", "divided by the number of ranks"

    def finish(self, loss, part):
        return loss / part.ranks


class DeviationOfOthers(Loss):
    SOURCE, CALLED = "NVIDIA-NeMo/RL#1518, #4158", "deviation of the others"

    def normalize(self, rewards):
        if len(rewards) < 2:
            return super().normalize(rewards)
        others = [torch.cat([rewards[:place], rewards[place + 1 :]]) for place in range(len(rewards))]
        deviations = torch.stack([each.std() if len(each) > 1 else each.sum() * 0 for each in others])
        return (rewards - torch.stack([each.mean() for each in others])) / (deviations + 1e-6)


class ScoresDivided(Loss):
    SOURCE, CALLED = "PrimeIntellect-ai/prime-rl#697", "log-probabilities divided by the temperature"

    def score(self, logits, ids, temperature):
        return super().score(logits, ids, 1.0) / temperature


class TemperatureMissing(Loss):
    SOURCE, CALLED = "NVIDIA-NeMo/RL#316", "option ignored: temperature"

    def score(self, logits, ids, temperature):
        return super().score(logits, ids, 1.0)


PLANTED: list[Any] = [each for each in list(vars().values()) if getattr(each, "SOURCE", "")]
assert len(PLANTED) == 20
