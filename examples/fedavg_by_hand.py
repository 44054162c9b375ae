"""FedAvg by hand: what ``fedgrove run fedavg`` does, in plain PyTorch; a test compares the two.

Only data, initial weights and random draws come from fedgrove, so that both do the same steps. To
read next to ``src/fedgrove/methods/fedavg.py``: this is what that file leaves to engines and parts.
Left out: what dropout and BatchNorm need, refusal of damaged updates, checkpoints, real bytes.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedgrove import data, nets, seeds
from fedgrove.data import ClientData, Examples, Federation

Weights = dict[str, Tensor]


def draw_cohort(clients: list[int], size: int, seed: int, number: int) -> list[int]:
    """The clients of a round, without replacement, in order of their ids."""
    rng = seeds.numpy_rng(seed, number, "cohort")
    return sorted(int(k) for k in rng.choice(sorted(clients), size, replace=False))


def train(
    net: nn.Module, client: ClientData, epochs: int, batch: int, lr: float, seed: int
) -> Weights:
    """E epochs of Adam on one client's training data, in place: w_k."""
    optimiser = torch.optim.Adam(net.parameters(), lr=lr)
    part = client.train
    net.train()
    for epoch in range(epochs):
        rng = seeds.torch_rng(seed, "shuffle", 0, epoch)
        # The last batch of an epoch is the smaller one that is left, not dropped.
        for rows in torch.split(torch.randperm(len(part), generator=rng), batch):
            optimiser.zero_grad()
            F.cross_entropy(net(part.x[rows]), part.y[rows]).backward()
            optimiser.step()
    return {name: value.detach() for name, value in net.state_dict().items()}


def average(models: list[Weights], examples: list[int]) -> Weights:
    """The weighted mean: w = sum_k n_k w_k / sum_k n_k, summed in double precision."""
    weights = torch.tensor(examples, dtype=torch.float64)
    weights /= weights.sum()
    mean = {}
    for name, value in models[0].items():
        stacked = torch.stack([model[name].double() for model in models])
        mean[name] = torch.tensordot(weights, stacked, dims=1).to(value.dtype)
    return mean


def fedavg(
    federation: Federation,
    net: nn.Module,
    *,
    rounds: int,
    cohort: int,
    epochs: int,
    batch: int,
    lr: float,
    seed: int = 0,
) -> Weights:
    """Rounds of FedAvg from the weights that ``net`` holds; the final weights."""
    clients = federation.clients
    weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
    for number in range(rounds):
        models = []
        examples = []
        for k in draw_cohort(list(clients), cohort, seed, number):
            local = copy.deepcopy(net)
            local.load_state_dict(weights)
            # A seed of its own for each client and round: the order of clients does not matter.
            train_seed = seeds.derive(seed, number, k, "train")
            models.append(train(local, clients[k], epochs, batch, lr, train_seed))
            examples.append(len(clients[k].train))
        weights = average(models, examples)
    return weights


@torch.no_grad()
def accuracy(net: nn.Module, part: Examples) -> float:
    """The share of examples that the network gets right."""
    net.eval()
    return float((net(part.x).argmax(1) == part.y).double().mean())


def score(federation: Federation, net: nn.Module, weights: Mapping[str, Tensor]) -> list[float]:
    """The accuracy of one model on every client's own test data."""
    net.load_state_dict(weights)
    return [accuracy(net, client.test) for client in federation.clients.values()]


def main(words: list[str] | None = None) -> None:
    """Train on the built-in digits as fedgrove does by default, and print the accuracy."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    federation = data.load("digits", seed=args.seed)
    recipe = federation.defaults
    net = nets.build(recipe.net, federation.shape, federation.classes, args.seed)
    weights = fedavg(
        federation,
        net,
        rounds=args.rounds,
        cohort=recipe.cohort,
        epochs=recipe.epochs,
        batch=recipe.batch,
        lr=recipe.lr,
        seed=args.seed,
    )
    scores = score(federation, net, weights)
    mean = sum(scores) / len(scores)
    print(f"{len(scores)} clients: mean accuracy {mean:.4f}, worst {min(scores):.4f}")


if __name__ == "__main__":
    main()
