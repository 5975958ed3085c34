from epdserve.loadtest import pools

PAGE = """# HELP epdserve_kvstore_pages pages by phase
# TYPE epdserve_kvstore_pages gauge
epdserve_kvstore_pages{phase="free"} 1000.0
epdserve_kvstore_pages{phase="sealed"} 3.0
epdserve_kvstore_pages{phase="cached"} 21.0
epdserve_kvstore_pages{phase="quarantined"} 2.0
epdserve_kvstore_slots{pool="state",state="held"} 0.0
epdserve_kvstore_leases 1.0
process_resident_memory_bytes 9.473642496e+09
# EOF
"""


def test_samples_are_found_by_name_and_labels() -> None:
    samples = pools.parse(PAGE)
    assert samples['epdserve_kvstore_pages{phase="free"}'] == 1000
    assert samples["process_resident_memory_bytes"] == 9.473642496e9
    assert len(samples) == 7


def test_what_is_used_counts_and_what_is_cached_or_quarantined_does_not() -> None:
    assert pools.busy(pools.parse(PAGE)) == {
        'epdserve_kvstore_pages{phase="sealed"}': 3,
        "epdserve_kvstore_leases": 1,
    }
    assert pools.busy({}) == {}


def test_workers_are_found_in_what_up_says() -> None:
    server = {"workers": [{"worker": "store-0", "metrics_address": "127.0.0.1:1", "role": "store"}]}
    assert pools.addresses(server) == {"store-0": "127.0.0.1:1"}
