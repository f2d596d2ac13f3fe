# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 - Model states and mixed precision
#
# **You build:** `model_state_bytes` and `MixedPrecisionAdam`.

# %% tags=["parameters"]
WORLD_SIZE = 4  # number of ranks (processes) in most cells, at least 2
DEVICE = "auto"  # "auto": one GPU per rank if there are enough, else the CPU
SEED = 0

# %% tags=["export"]
import torch
import torch.distributed as dist

# %%

# %% [markdown]
# ### Exercise 01.model_state_bytes


# %% nbgrader={"grade": false, "grade_id": "model_state_bytes", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
def model_state_bytes(model, optimizer):
    """Bytes of memory held by the model states: {"weights": int, "gradients": int, "optimizer": int}.

    weights: the model's parameters. gradients: their `.grad`. optimizer: the tensors in `optimizer.state`, which maps
    each parameter to a dict. Memory counts once, however many tensors share it.
    """
    ### BEGIN SOLUTION
    counted = set()

    def nbytes(tensors):
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    values = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "weights": nbytes(parameters),
        "gradients": nbytes(gradients),
        "optimizer": nbytes(value for value in values if torch.is_tensor(value)),
    }
    ### END SOLUTION


# %% [markdown]
# ### Exercise 01.MixedPrecisionAdam


# %% nbgrader={"grade": false, "grade_id": "MixedPrecisionAdam", "locked": false, "schema_version": 3, "solution": true, "task": false} tags=["export"]
class MixedPrecisionAdam:
    """AdamW on fp16 (or bf16, or fp32) parameters: fp32 master weights and moments, dynamic loss scaling.

    Holds 12 bytes per element beside the weights and gradients. Sends one number per step, when there are more ranks.
    """

    def __init__(
        self,
        parameters,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        scale=2.0**16,
        growth_interval=2000,
    ):
        self.parameters = list(parameters)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.scale, self.growth_interval = float(scale), growth_interval
        self.steps_without_overflow = 0
        self.state = {}  # parameter: {"master": ..., "first_moment": ..., "second_moment": ..., "step": ...}
        ### BEGIN SOLUTION
        for parameter in self.parameters:
            # copy=True: without it, `to` gives back the very same tensor when the parameter is fp32 already.
            master = parameter.detach().to(torch.float32, copy=True)
            self.state[parameter] = {
                "master": master,
                "first_moment": torch.zeros_like(master),
                "second_moment": torch.zeros_like(master),
                "step": 0,
            }
        ### END SOLUTION

    def backward(self, loss):
        """Backward of the loss times the scale: `.grad` holds scaled gradients."""
        ### BEGIN SOLUTION
        (loss * self.scale).backward()
        ### END SOLUTION

    @torch.no_grad()
    def step(self):
        """One AdamW step on all parameters that have a gradient. False: some rank's overflowed, nothing has changed."""
        ### BEGIN SOLUTION
        with_gradient = [each for each in self.parameters if each.grad is not None]
        if self._overflow_on_any_rank(with_gradient):
            self.scale = max(self.scale / 2, 1.0)
            self.steps_without_overflow = 0
            return False
        for parameter in with_gradient:
            self._update(parameter, **self.state[parameter])
        self.steps_without_overflow += 1
        if self.steps_without_overflow == self.growth_interval:
            self.scale *= 2
            self.steps_without_overflow = 0
        return True

    def _overflow_on_any_rank(self, parameters):
        finite = all(parameter.grad.isfinite().all() for parameter in parameters)
        if dist.is_initialized() and dist.get_world_size() > 1:
            device = self.parameters[0].device
            flag = torch.tensor(0.0 if finite else 1.0, device=device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            return flag.item() > 0
        return not finite

    def _update(self, parameter, master, first_moment, second_moment, step):
        beta1, beta2 = self.betas
        step += 1
        gradient = (
            parameter.grad.float() / self.scale
        )  # fp32 first: fp16 would lose the small ones
        first_moment.lerp_(gradient, 1 - beta1)
        second_moment.lerp_(gradient.square(), 1 - beta2)
        mean = first_moment / (1 - beta1**step)
        deviation = (second_moment / (1 - beta2**step)).sqrt()
        master.mul_(1 - self.lr * self.weight_decay)
        master.sub_(self.lr * mean / (deviation + self.eps))
        parameter.copy_(master)
        self.state[parameter]["step"] = step
        ### END SOLUTION

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None
