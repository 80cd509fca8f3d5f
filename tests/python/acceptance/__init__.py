"""What TorchServe's own tests observe, observed here: one test for each of its lines.

A module has one section of those tests, and each test names the file whose line it covers. Small
models stand in for the pretrained ones, and a web server of the test for a public one. README.md
says which test covers which numbered behaviour.

Not covered yet, with the part of the server that they wait for:

- gRPC: test_gRPC_management_apis, test_gRPC_model_control, test_gRPC_token_authorization,
  test_gRPC_allowed_urls and test_gRPC_inference_api over their own transport. What they check is
  covered over REST.
- workflows: postman/workflow, workflow_inference, those of test_token_authorization,
  workflow-archiver/integ.
- `torchrun`: test_parallelism.
- packages per model: test_model_custom_dependencies, StreamPredictions2's requirements.
- handlers: `object_detector`, `image_segmenter`, `text_classifier`, test_pytorch_profiler, and
  test_onnx, which needs a package that the tests do not install.
- the Python side (section 8): handlers/tests has it.
"""
