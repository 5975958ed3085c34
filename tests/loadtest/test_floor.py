from epdserve.loadtest.floor import gemm_gflop_per_s, memcpy_gb_per_s


def test_rates_are_positive() -> None:
    assert memcpy_gb_per_s(1 << 20) > 0
    assert gemm_gflop_per_s(64, threads=1) > 0
