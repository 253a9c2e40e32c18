import torch

from headstart.inference.clock import synchronise


def test_only_devices_with_a_queue_are_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    synchronise(torch.device("cpu"))
    assert waited == []
    for device in (torch.device("cuda", 0), torch.device("mps")):
        synchronise(device)
    assert waited == [torch.device("cuda", 0), torch.device("mps")]
