import pytest
import torch

from hot.backends.streams import Aside
from hot.backends.transforms import held_basis

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_calls_follow_each_other_on_a_cpu() -> None:
    aside = Aside(torch.ones(1))
    assert aside.second is None
    with aside:
        ready = torch.ones(3)
    aside.join()
    assert ready.sum() == 3


@pytest.mark.gpu
@gpu
def test_the_current_stream_is_the_current_one_again_even_after_an_error() -> None:
    t = torch.ones(1, device="cuda")
    for current in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(current):
            with pytest.raises(ZeroDivisionError), Aside(t):
                assert torch.cuda.current_stream() != current
                raise ZeroDivisionError
            assert torch.cuda.current_stream() == current


@pytest.mark.gpu
@gpu
def test_every_stream_has_a_second_one_of_its_own() -> None:
    t, streams = torch.ones(1, device="cuda"), [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(3))]
    seconds = []
    for current in streams:
        with torch.cuda.stream(current):
            seconds.append(Aside(t).second)
            assert Aside(t).second == seconds[-1]
    assert len({*seconds, *streams}) == 2 * len(streams)
    pool = {torch.cuda.Stream().cuda_stream for _ in range(100)}
    assert not pool & {second.cuda_stream for second in seconds}


@pytest.mark.gpu
@gpu
def test_what_is_made_aside_is_seen_and_not_overwritten() -> None:
    """Each is freed while slow readers of it still wait on the current stream, and its memory is given out again aside."""
    t = torch.arange(2**20, device="cuda", dtype=torch.float32)
    found = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for number in range(20):
            aside = Aside(t)
            with aside:
                torch.cuda._sleep(100_000)
                ready = t + number
            torch.cuda._sleep(300_000)
            aside.join()
            torch.cuda._sleep(300_000)
            found.append(ready * 2)
            del ready
    torch.cuda.synchronize()
    for number, one in enumerate(found):
        torch.testing.assert_close(one, (t + number) * 2, rtol=0, atol=0)


@pytest.mark.gpu
@gpu
def test_it_can_be_captured() -> None:
    t, stream, graph = torch.ones(1000, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        aside = Aside(t)
        with aside:
            left = t * 2
        right = t * 3
        aside.join()
        both = left + right
    t.fill_(10)
    graph.replay()
    torch.cuda.synchronize()
    assert (both == 50).all()


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("block", [1, 16])
def test_a_basis_that_was_made_aside_is_there_for_all(block: int) -> None:
    """Both streams multiply by it; the second asks first, and the current one does not wait for that."""
    what = block, tuple(range(block)), (), torch.bfloat16, torch.device("cuda", torch.cuda.current_device())
    expected = held_basis(*what).clone()
    held_basis.cache_clear()
    with Aside(expected):
        torch.cuda._sleep(100_000_000)
        made = held_basis(*what)
    assert torch.equal(made.clone(), expected)
