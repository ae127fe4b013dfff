"""TRL's GRPO with the sampler's routing: importance ratios are nearer to 1 when the trainer replays it.

    python examples/grpo_routing_replay.py

A rollout engine computes in other numerics than the trainer. Here it is a copy of the model with noise in its weights,
about as large as bfloat16's rounding. Where two experts score almost the same, the two models choose different ones,
and the probabilities of the token differ by more than the noise alone explains. `record_routing` records the sampler's
experts, `replay_routing` runs the trainer's forward and backward with them.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from typing import Any

import torch
from common import moe_model
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl_trainers import WORDS, tokenizer

import memfine_fx

NOISE = 2.0**-8  # relative; bfloat16 has 8 significant bits
EOS = 1
STEPS = 5


class Sampler:
    """A rollout engine: before each rollout it gets the trainer's weights, with noise.

    Attributes:
        routing: experts [S,L,K] of each sequence of the latest rollout, by the sequence's S token ids without padding.
    """

    def __init__(self, model: Any) -> None:
        self._model = copy.deepcopy(model).eval()
        self.routing: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def rollout(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[list[Any]]]:
        """Sample a completion of each prompt, as TRL's `rollout_func`."""
        for weight, trained in zip(self._model.parameters(), trainer.model.parameters(), strict=True):
            weight.copy_(trained * (1 + NOISE * torch.randn_like(trained)))
        self.routing.clear()
        batch = trainer.processing_class(prompts, return_tensors="pt", padding=True, padding_side="left")
        prompt_ids, prompt_mask = batch["input_ids"], batch["attention_mask"]
        sampled = self._model.generate(
            prompt_ids, attention_mask=prompt_mask, max_new_tokens=trainer.args.max_completion_length,
            do_sample=True, top_k=0,
        )  # fmt: skip
        results: dict[str, list[list[Any]]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        for row, mask in zip(sampled, prompt_mask, strict=True):
            prompt, completion = row[: len(mask)][mask.bool()], row[len(mask) :]
            is_after_eos = (completion == EOS).cumsum(0) - (completion == EOS).long() > 0
            completion = completion[~is_after_eos]
            sequence = torch.cat([prompt, completion])
            with memfine_fx.record_routing(self._model) as record:
                logps = self._model(input_ids=sequence[None]).logits[0].log_softmax(-1)
            self.routing[tuple(sequence.tolist())] = record.ids
            completion_logps = logps[len(prompt) - 1 : -1].gather(-1, completion[:, None])  # row t predicts token t + 1
            results["prompt_ids"].append(prompt.tolist())
            results["completion_ids"].append(completion.tolist())
            results["logprobs"].append(completion_logps[:, 0].tolist())
        return results


class ReplayTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPO with ratios over the sampler's probabilities, whose forward and backward replay the sampler's routing.

    Attributes:
        deviations: mean |ratio - 1| over the completion tokens of each step, without and with replay.
    """

    def __init__(self, sampler: Sampler, **options: Any) -> None:
        super().__init__(rollout_func=sampler.rollout, **options)
        self._sampler = sampler
        self.deviations: list[tuple[float, float]] = []

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        # TRL checkpoints activations by default: backward recomputes layers, so the replay ends after it.
        with contextlib.ExitStack() as self._until_backward:
            return super().training_step(*args, **options)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        # TRL corrects for the sampler's probabilities with vLLM only. As old probabilities they are in the ratio.
        self._inputs = inputs | {"old_per_token_logps": inputs["sampling_per_token_logps"]}
        return super()._compute_loss(model, self._inputs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **options: Any
    ) -> Any:
        inputs = model, input_ids, attention_mask, *args
        if not torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*inputs, **options)
        with torch.no_grad():  # only to compare
            without = self._deviation(self._get_per_token_logps_and_entropies(*inputs)[0])
        # TRL shuffles the sequences and pads prompts on the left, completions on the right. The ids have no padding.
        sequences = [tuple(row[mask.bool()].tolist()) for row, mask in zip(input_ids, attention_mask, strict=True)]
        ids = torch.cat([self._sampler.routing[sequence] for sequence in sequences])
        self._until_backward.enter_context(memfine_fx.replay_routing(model, ids, mask=attention_mask))
        results = super()._get_per_token_logps_and_entropies(*inputs, **options)
        self.deviations.append((without, self._deviation(results[0].detach())))
        return results

    def _deviation(self, logps: Tensor) -> float:
        ratios = (logps - self._inputs["old_per_token_logps"]).exp()
        return float((ratios - 1).abs()[self._inputs["completion_mask"].bool()].mean())


def main() -> None:
    prompts = [" ".join(f"w{(7 * row + place) % WORDS}" for place in range(3 + row % 4)) for row in range(8)]
    model = moe_model(
        experts_implementation="memfine", num_hidden_layers=3, num_experts_per_tok=2, vocab_size=WORDS + 3,
        eos_token_id=EOS, bos_token_id=EOS,
    )  # fmt: skip
    for parameter in model.parameters():
        if parameter.ndim > 1:  # large enough for a token's experts to matter, as in a trained model
            torch.nn.init.normal_(parameter, std=0.15)
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=16, num_generations=4, use_cpu=True,
            max_completion_length=24, learning_rate=1e-3, logging_strategy="no", save_strategy="no", report_to=[],
            disable_tqdm=True, bf16=False,
        )  # fmt: skip
        trainer = ReplayTrainer(
            Sampler(model),
            model=model,
            reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
            args=args,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer(),
        )
        trainer.train()
    print("step  mean |ratio - 1| without replay  with replay")
    for step, (without, replayed) in enumerate(trainer.deviations, start=1):
        print(f"{step:4}  {without:31.5f}  {replayed:11.5f}")
    if not all(replayed < without for without, replayed in trainer.deviations):
        raise SystemExit("FAILED: replay did not bring the ratios nearer to 1")
    print("OK")


if __name__ == "__main__":
    main()
