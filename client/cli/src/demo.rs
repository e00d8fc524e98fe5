use crate::args::DemoArgs;
use crate::output::Outcome;
pub fn run(_: &DemoArgs) -> Outcome {
    Ok(())
}
