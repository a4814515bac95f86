.PHONY: demo test check chaos fuzz lock

demo test check lock:
	./dev $@

chaos:
	./dev pytest -m chaos

fuzz:
	FUZZ_MESSAGES=100000 ./dev pytest tests/service/test_fuzz.py
