"""Searches a learning rate and a width with Optuna: each trial is a run of `towers.train`.

Bad trials are pruned, which ends them early.

    pip install optuna optuna-integration
    python -m examples.trackers.with_optuna
"""

import keras
import optuna
from optuna_integration import KerasPruningCallback

import towers
from examples.trackers import digits


def main(
    trials: int = 8, epochs: int = 4, examples: int = 3000, directory: str = "study"
) -> optuna.Study:
    """Runs the study. Each trial writes a run directory."""
    train, test = digits.load(examples)

    def objective(trial: optuna.Trial) -> float:
        learning_rate = trial.suggest_float("learning_rate", 1e-5, 1e-1, log=True)
        units = trial.suggest_int("units", 16, 128, log=True)
        history = towers.train(
            digits.make_config(epochs=epochs, run_dir=f"{directory}/trial-{trial.number:03}"),
            [KerasPruningCallback(trial, "val_accuracy")],
            model=digits.make_model(learning_rate, units),
            train=train,
            test=test,
        )
        keras.utils.clear_session()  # frees the memory of the trial
        return max(history["val_accuracy"])

    study = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    study.optimize(objective, n_trials=trials)
    pruned = len(study.get_trials(states=[optuna.trial.TrialState.PRUNED]))
    print(
        f"{trials} trials, {pruned} pruned; best accuracy {study.best_value:.3f} with "
        f"{study.best_params}"
    )
    return study


if __name__ == "__main__":
    main()
