"""Estimate true labels and each annotator's error rates from votes that disagree (Dawid and Skene's model)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from components.stats.annotator_votes import Votes, plurality, swapped
from components.stats.intervals import FloatArray


class DawidSkene(NamedTuple):
    """A fitted model: true labels and annotators' confusion matrices."""

    posterior: FloatArray
    """(I, K) probability that label k is item i's true one, given all votes; NaN for items without votes."""
    confusion: FloatArray
    """(A, K, K) indexed [a, k, l]: probability that annotator a answers l where k is true."""
    prior: FloatArray
    """(K,) share of items whose true label is k."""
    log_likelihood: float
    """Log-likelihood of the votes in nats, without the prior that smoothing adds."""
    converged: bool

    @property
    def label(self) -> NDArray[np.int8]:
        """Return the most probable labels (I,); NONE where two are equal to nine digits or there is no vote."""
        return plurality(np.round(self.posterior, 9))

    @property
    def accuracy(self) -> FloatArray:
        """Return each annotator's probability (A,) of giving the true label of an item whose label follows `prior`."""
        return np.asarray(np.einsum("k,akk->a", self.prior, self.confusion))


def dawid_skene(
    votes: Votes, symmetric: bool = True, smoothing: float = 0.1, tolerance: float = 1e-7, max_iterations: int = 500
) -> DawidSkene:
    """Fit true labels and confusion matrices by EM (Dawid and Skene 1979, Applied Statistics 28:20, section 3).

    The posterior starts as the vote shares (eq. 3.1). Then two steps alternate: class shares (eq. 2.4) and confusion
    matrices (eq. 2.3) from the posterior, and the posterior (eq. 2.5) from these, in logs. As in the paper, an
    annotator's repeated votes on an item all count. A label that nobody gave keeps probability 0.

    Args:
        symmetric: constrain the confusion matrices and the prior to be unchanged when first and second are exchanged,
            which equals fitting each item in both orders. An annotator then has three parameters instead of six, and
            data that stores the winner first does not teach that the first is always better. False measures position
            bias; use it only where the stored order is the one that annotators saw and was drawn at random.
        smoothing: votes added to each of an annotator's K x K cells (a Dirichlet prior), so that an annotator with few
            votes is not taken for infallible; above 0.
        tolerance: EM stops when an iteration raises the log-posterior by less than this, in nats a vote.

    Raises:
        ValueError: no votes, or a vote without an annotator.
    """
    if not votes.item.size or votes.annotator.min() < 0:
        raise ValueError("Dawid-Skene needs votes, each with its annotator")
    size, labels, swap = votes.annotators, votes.labels, swapped(votes.labels)
    counts = votes.counts()
    rated = counts.any(axis=1)
    cell = votes.annotator * np.int64(labels) + votes.label
    answers = sparse.csr_array((np.ones(cell.size), (votes.item, cell)), shape=(votes.items, size * labels))[rated]

    def parameters(posterior: FloatArray) -> tuple[FloatArray, FloatArray]:
        prior = posterior.mean(axis=0)
        expected = (answers.T @ posterior).reshape(size, labels, labels).swapaxes(1, 2) + smoothing
        if symmetric:
            prior = (prior + prior[swap]) / 2
            expected = (expected + expected[:, swap][:, :, swap]) / 2
        return prior, expected / expected.sum(axis=2, keepdims=True)

    posterior = counts[rated] / counts[rated].sum(axis=1, keepdims=True)
    best, converged = -np.inf, False
    for _ in range(max_iterations):
        prior, confusion = parameters(posterior)
        with np.errstate(divide="ignore"):
            joint = np.log(prior) + answers @ np.log(confusion).swapaxes(1, 2).reshape(size * labels, labels)
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
    """Return the posterior (I, K) from log-probabilities `joint` (I, K), and the sum over items of their log-sum-exp.

    Computed label by label, since numpy and scipy's logsumexp are ten times slower along an axis of length three.
    """
    by_label = np.ascontiguousarray(joint.T)
    top = by_label.max(axis=0)
    weight = np.exp(by_label - top)
    total = weight.sum(axis=0)
    return (weight / total).T, float((top + np.log(total)).sum())
