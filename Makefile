.PHONY: demo test check chaos lock

demo test check lock:
	./dev $@

chaos:
	./dev pytest -m chaos
