"""Whom to believe where annotators differ: Dawid and Skene's model of true labels and of each annotator's errors."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from components.stats.intervals import FloatArray
from components.stats.votes import Votes, plurality, swapped


class DawidSkene(NamedTuple):
    """A fitted model of who errs how."""

    posterior: FloatArray
    """Probability of each item's true label given all votes, (I, K); NaN for items without votes."""
    confusion: FloatArray
    """Probability that annotator a answers l where k is true, (A, K, K) as [a, k, l]."""
    prior: FloatArray
    """Share of items whose true label is k, (K,)."""
    log_likelihood: float
    """Of the votes, in nats, without the smoothing's prior."""
    converged: bool

    @property
    def label(self) -> NDArray[np.int8]:
        """The most probable label, (I,); NONE where two are equally probable (to nine digits) or there is no vote."""
        return plurality(np.round(self.posterior, 9))

    @property
    def accuracy(self) -> FloatArray:
        """Each annotator's probability of answering the true label of an item drawn by `prior`, (A,)."""
        return np.asarray(np.einsum("k,akk->a", self.prior, self.confusion))


def dawid_skene(
    votes: Votes, symmetric: bool = True, smoothing: float = 0.1, tolerance: float = 1e-7, max_iterations: int = 500
) -> DawidSkene:
    """True labels and annotators' confusion matrices by EM (Dawid and Skene 1979, Applied Statistics 28:20, section 3).

    From the vote shares (eq. 3.1), in turn: class shares (eq. 2.4) and confusion matrices (eq. 2.3) from the posterior,
    and the posterior (eq. 2.5), in logs. A vote by the same annotator on the same item again counts again, as there.
    A label that nobody gave keeps the probability 0.

    Args:
        symmetric: exchanging first and second leaves an annotator's confusion matrix, and the prior, as they are; the
            same as fitting each item in both orders. Three numbers an annotator instead of six, and a data set that
            stores its winner first does not teach that the first is always better. False sees position bias, and is
            sound where the stored order is the shown one and was drawn by chance.
        smoothing: votes added to each of the K x K cells of an annotator (a Dirichlet prior), so that a few votes make
            nobody infallible; above 0.
        tolerance: EM stops when an iteration raises the log-posterior by less than this, in nats a vote.

    Raises:
        ValueError: no votes, a vote without an annotator, or a smoothing that is not above 0.
    """
    if not votes.item.size or votes.annotator.min() < 0:
        raise ValueError("Dawid-Skene needs votes, each with its annotator")
    if smoothing <= 0:
        raise ValueError(f"smoothing must be above 0, not {smoothing}")
    size, labels, swap = votes.annotators, votes.labels, swapped(votes.labels)
    counts = votes.counts()
    rated = counts.any(axis=1)
    cell = votes.annotator * np.int64(labels) + votes.label
    given = sparse.csr_array((np.ones(cell.size), (votes.item, cell)), shape=(votes.items, size * labels))[rated]

    def parameters(posterior: FloatArray) -> tuple[FloatArray, FloatArray]:
        prior = posterior.mean(axis=0)
        expected = (given.T @ posterior).reshape(size, labels, labels).swapaxes(1, 2) + smoothing
        if symmetric:
            prior = (prior + prior[swap]) / 2
            expected = (expected + expected[:, swap][:, :, swap]) / 2
        return prior, expected / expected.sum(axis=2, keepdims=True)

    posterior = counts[rated] / counts[rated].sum(axis=1, keepdims=True)
    best, converged = -np.inf, False
    for _ in range(max_iterations):
        prior, confusion = parameters(posterior)
        with np.errstate(divide="ignore"):
            joint = np.log(prior) + given @ np.log(confusion).swapaxes(1, 2).reshape(size * labels, labels)
        posterior, log_likelihood = _normalised(joint)
        objective = log_likelihood + smoothing * float(np.log(confusion).sum())
        converged = objective - best < tolerance * cell.size
        if converged:
            break
        best = objective
    everywhere = np.full((votes.items, labels), np.nan)
    everywhere[rated] = posterior
    return DawidSkene(everywhere, confusion, prior, log_likelihood, converged)


def _normalised(joint: FloatArray) -> tuple[FloatArray, float]:
    """The posterior (I, K) of log-probabilities `joint` (I, K), and the sum over items of their log-sum-exp.

    Label by label: numpy is ten times slower along an axis of length three, and so is scipy's logsumexp.
    """
    by_label = np.ascontiguousarray(joint.T)
    top = by_label.max(axis=0)
    weight = np.exp(by_label - top)
    total = weight.sum(axis=0)
    return (weight / total).T, float((top + np.log(total)).sum())
