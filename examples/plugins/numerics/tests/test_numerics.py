"""The public conformance suites over these plugins, and what each does."""

from pathlib import Path

import torch

from fairlead.testing import AcceleratorConformance, LayerSyncConformance, PrecisionConformance


class TestNuma(AcceleratorConformance):
    plugin_name = "numa"


class TestTF32(PrecisionConformance):
    plugin_name = "tf32"

    def test_it_lasts_as_long_as_the_run(self, tmp_path: Path) -> None:
        precision = self.build(tmp_path)
        precision.convert_module(torch.nn.Linear(2, 2))
        assert torch.get_float32_matmul_precision() == "high"
        precision.teardown()
        assert torch.get_float32_matmul_precision() == "highest"


class TestFrozenBatchNorm(LayerSyncConformance):
    plugin_name = "frozen_batchnorm"

    def test_statistics_stay(self, tmp_path: Path) -> None:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
        sync = self.build(tmp_path)
        sync.apply(model).train()(torch.randn(8, 2))
        assert model[0].num_batches_tracked == 0
        sync.revert(model).train()(torch.randn(8, 2))
        assert model[0].num_batches_tracked == 1
