"""What a rank imports sooner or later, whatever the job: a fork server imports this module, once for all ranks."""

import lightning.pytorch  # noqa: F401 - with torch._dynamo and torchmetrics two thirds of what a start takes
import torch.distributed.algorithms.ddp_comm_hooks  # noqa: F401

import fairlead_lightning.commands.arguments
import fairlead_lightning.commands.ranks
import fairlead_lightning.commands.run  # noqa: F401
