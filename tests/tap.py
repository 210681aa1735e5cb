"""TAP for the Python tests: tap.run(globals()) runs every function named test_*, in the order of the file.
A test fails by any exception; tap.skip("why") counts it as skipped. A test's docstring is its name."""
import sys
import traceback


class Skip(Exception):
    pass


def skip(why):
    raise Skip(why)


def run(names):
    tests = [f for n, f in names.items() if n.startswith("test_") and callable(f)]
    print(f"1..{len(tests)}")
    failed = 0
    for i, test in enumerate(tests, 1):
        name = (test.__doc__ or test.__name__).strip().splitlines()[0]
        try:
            test()
            print(f"ok {i} - {name}", flush=True)
        except Skip as why:
            print(f"ok {i} - {name} # SKIP {why}", flush=True)
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"not ok {i} - {name}", flush=True)
    sys.exit(1 if failed else 0)
