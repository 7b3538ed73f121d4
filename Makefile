.PHONY: run test
run:
	./run.sh $(ARGS)
test:
	./test.sh $(ARGS)
