"""
How near to an isometry random up-projections come by the changes of basis that `egmla convert --gate` makes: the table
in docs/conversion.md. Needs no data; about a minute on one core.

    python benchmarks/near_isometry.py
"""

import torch

from modeling_egmla.conversion.gating import near_isometry


SHAPES = [
    (12, 64, 64),
    (12, 64, 128),
    (12, 64, 256),
    (16, 128, 512),
    (40, 64, 256),
]  # heads, channels of K and V, latent

if __name__ == "__main__":
    torch.manual_seed(0)
    print("heads  channels  latent  spread before  after  mean       variation of the standard deviation")
    for heads, channels, rank in SHAPES:
        kv_b, weight = torch.randn(heads * 2 * channels, rank), 0.5 + torch.rand(rank)
        basis = near_isometry(kv_b, weight, heads, channels)
        up = (kv_b.double() * weight).unflatten(0, (heads, -1))
        up = torch.cat([basis.keys @ up[:, :channels], basis.values @ up[:, channels:]], dim=1).flatten(0, 1)
        latents = torch.nn.functional.normalize(torch.randn(1000, rank, dtype=torch.float64), dim=1) * rank**0.5
        features = latents @ up.T
        deviations = features.std(1, unbiased=False)
        print(
            f"{heads:5}  {channels:8}  {rank:6}  {basis.spread_before:13.3g}  {basis.spread_after:5.3g}  "
            f"{features.mean(1).abs().max().item():.1e}  {(deviations.std() / deviations.mean()).item():.1e}"
        )
