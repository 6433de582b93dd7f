# SPDX-License-Identifier: Apache-2.0
"""The learned activation xIELU: quadratic for positive inputs, exponential for negative ones.

Source: https://arxiv.org/abs/2411.13010
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.module import Module


class XIELU(Module):
    """Activation function with parameters of its own."""

    def __init__(self, factory: ParamFactory) -> None:
        self.alpha_p = factory.empty(1)
        self.alpha_n = factory.empty(1)
        self.beta = factory.empty()
        self.eps = factory.empty()

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the activation to a tensor of any shape."""
        beta, values = self.beta.float(), x.float()
        positive = F.softplus(self.alpha_p.float()) * values * values
        negative = torch.expm1(torch.minimum(values, self.eps.float())) - values
        negative.mul_(beta + F.softplus(self.alpha_n.float()))
        return torch.where(values > 0, positive, negative).add_(values * beta).to(x.dtype)
